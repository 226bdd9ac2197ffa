"""Which of the target's layers a DLite drafter reads."""

from __future__ import annotations

from dlite_agent.errors import ConfigError


def pivot_layer_ids(num_layers: int, num_features: int) -> tuple[int, ...]:
    """Return the layers whose pivot hidden states feed a DLite drafter: first, last and evenly spread middles.

    Raises:
        ConfigError: If there are fewer than two features or more than layers.
    """
    if not 2 <= num_features <= num_layers:
        raise ConfigError(f"{num_features} feature layers of {num_layers}; expected between 2 and {num_layers}")
    middles = num_features - 2
    if middles == 0:
        return (0, num_layers - 1)
    steps = [0.5] if middles == 1 else [i / (middles - 1) for i in range(middles)]
    return (0, *(1 + round(step * (num_layers - 3)) for step in steps), num_layers - 1)
