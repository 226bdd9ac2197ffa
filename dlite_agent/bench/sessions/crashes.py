"""Ends: of the worker at any of its commands, of the server under load, of the connection around the head's commit."""

from __future__ import annotations

import threading

from redis.backoff import NoBackoff
from redis.retry import Retry

from dlite_agent.bench.sessions.proxy import Cut, Proxy
from dlite_agent.bench.sessions.servers import FSYNCS
from dlite_agent.bench.sessions.trial import Trial
from dlite_agent.bench.sessions.worker import FUSE_MODES, Errand, Fuse, Said, employ
from dlite_agent.config import Durability

_COMMANDS = 9  # more than a turn sends
_REPLY_TOKENS = 6
_CUTS: tuple[Cut, ...] = ("before", "after")


def worker_killed(trial: Trial) -> None:
    """SIGKILL the worker at one of its commands, in its first or in its second turn."""
    trial.converse(trial.keeper(), num_turns=trial.random.randint(0, 2))
    step = trial.seed % (_COMMANDS * len(FUSE_MODES))
    fuse = Fuse(trial.random.randint(0, 1), 1 + step % _COMMANDS, FUSE_MODES[step // _COMMANDS])
    said = _employ(trial, fuse=fuse)
    trial.note = f"{fuse.mode} command {fuse.command} of turn {fuse.turn}: exit code {said.exit_code}"
    trial.check_kept()
    trial.check_usable(must_reuse=bool(trial.acknowledged))


def clock_off(trial: Trial) -> None:
    """Have a worker whose wall clock is hours off work between two whose clocks are right."""
    trial.converse(trial.keeper())
    hours = trial.random.choice([-30, -5, -1, 1, 5, 30, 24 * 400])
    said = _employ(trial, clock_offset_s=3600.0 * hours)
    trial.note = f"{hours} hours: exit code {said.exit_code}"
    if said.exit_code != 0 or len(said.snapshot_ids) < 2:
        trial.unusable.append("the worker did not answer and store both turns")
    trial.check_kept()
    trial.check_usable(must_reuse=True)


def server_killed(trial: Trial) -> None:
    """SIGKILL the server while a session is being written, and start it again on its data."""
    fsync = FSYNCS[trial.seed // len(trial.lab.servers.binaries) % 2]
    server = trial.get_server(fsync)
    client = trial.client(retry=Retry(NoBackoff(), 0))
    durability: Durability = trial.random.choice(["turn", "turn", "async"])
    keeper = trial.keeper(trial.store(client), durability=durability)
    trial.converse(keeper)
    keeper.flush()
    delay = trial.random.uniform(0.0, 0.12)
    killer = threading.Timer(delay, server.kill)
    killer.start()
    num_turns = 1
    while killer.is_alive() or num_turns < 3:
        trial.converse(keeper)
        num_turns += 1
    killer.join()
    keeper.close()
    server.start()
    trial.note = f"appendfsync {fsync}, {delay * 1000:.0f} ms into {num_turns} turns"
    if durability == "async" or fsync == "everysec":
        trial.acknowledged.clear()  # nothing was promised; what is there must still be right
    trial.check_kept()
    trial.check_usable()


def connection_cut(trial: Trial) -> None:
    """Cut the connection before or after the commit of a head, for a moment or until the call has ended."""
    cut, is_for_good = _CUTS[trial.seed % 2], trial.seed // 2 % 2 == 1
    with Proxy(trial.server.socket) as proxy:
        options = {"retry": Retry(NoBackoff(), 0)} if is_for_good else {}
        keeper = trial.keeper(trial.store(trial.client(proxy.socket, **options)))
        trial.converse(keeper, num_turns=trial.random.randint(1, 2))
        proxy.cut = cut
        turn = trial.converse(keeper)
        trial.note = f"{cut}, {'no second try' if is_for_good else 'tried again'}"
        if not proxy.num_faults:
            trial.unusable.append("the commit was not cut: the scenario is broken")
        if not is_for_good and (turn is None or turn.snapshot_id is None):
            trial.unusable.append("a commit that could be tried again was not made")
        trial.check_kept()
        trial.converse(keeper)
    trial.check_usable(must_reuse=True)


def reads_cancelled(trial: Trial) -> None:
    """Give up reads and writes of a slow connection in the middle, and go on with the same client."""
    with Proxy(trial.server.socket) as proxy:
        client = trial.client(proxy.socket, socket_timeout=0.03, retry=Retry(NoBackoff(), 0))
        warm = trial.keeper(trial.store(client))
        trial.converse(warm)
        for _ in range(trial.random.randint(1, 3)):
            proxy.delay_s = trial.random.choice([0.0, 0.002, 0.02, 0.05])
            keeper = trial.random.choice([warm, trial.keeper(warm.store)])
            trial.converse(keeper)
        trial.note = f"the last delay of a reply was {proxy.delay_s} s"
        proxy.delay_s = 0.0
        trial.converse(trial.keeper(warm.store))
    trial.check_usable()


def replies_shifted(trial: Trial) -> None:
    """Repeat a reply, so that each one behind it answers the command before."""
    with Proxy(trial.server.socket) as proxy:
        trial.converse(trial.keeper(), num_turns=2)
        store = trial.store(trial.client(proxy.socket))
        proxy.shift_at = trial.random.randint(2, 4)  # within the pipeline that reads the blocks
        trial.note = f"reply {proxy.shift_at}"
        keeper = trial.keeper(store)
        trial.converse(keeper, num_turns=2)
        if not proxy.num_faults:
            trial.unusable.append("no reply was repeated: the scenario is broken")
        if not store.counters.foreign + store.counters.corrupt:
            trial.unusable.append("no record was refused, though each answered another's command")
        trial.converse(trial.keeper(store))
    trial.check_usable(must_reuse=True)


def replies_stale(trial: Trial) -> None:
    """Have the copy of an earlier reply arrive as the answer to a later command, whichever that is."""
    with Proxy(trial.server.socket) as proxy:
        store = trial.store(trial.client(proxy.socket))
        keeper = trial.keeper(store)
        trial.converse(keeper)
        proxy.stale_at = trial.random.randint(1, 16)
        trial.note = f"reply {proxy.stale_at}"
        for _ in range(4):
            trial.converse(trial.random.choice([keeper, trial.keeper(store)]))
        if not proxy.num_faults:
            trial.unusable.append("no reply was repeated: the scenario is broken")
    trial.check_usable(must_reuse=True)


def workers_alternate(trial: Trial) -> None:
    """Let two processes that stay alive, and a third that dies, answer in turns that follow no order."""
    keepers = [trial.keeper() for _ in range(2)]
    for index in range(7):
        if index == 3:
            fuse = Fuse(1, 1 + trial.seed % _COMMANDS, trial.random.choice(FUSE_MODES))
            trial.note = f"the third died {fuse.mode} command {fuse.command}: {_employ(trial, fuse=fuse).exit_code}"
        turn = trial.converse(trial.random.choice(keepers))
        if turn is None or turn.snapshot_id is None:
            trial.unusable.append(f"turn {index} was not stored, though no other was being made")
    trial.check_kept()
    trial.check_usable(must_reuse=True)


def _employ(trial: Trial, *, fuse: Fuse | None = None, clock_offset_s: float = 0.0) -> Said:
    """Have a worker make two turns, and take over what it said."""
    messages = tuple(tuple(trial.message()) for _ in range(2))
    errand = Errand(
        trial.server.socket,
        trial.name,
        tuple(trial.history),
        messages,
        _REPLY_TOKENS,
        fuse=fuse,
        clock_offset_s=clock_offset_s,
    )
    said = employ(errand)
    for message, text in zip(messages, said.texts, strict=False):
        prompt = [*trial.history, *message]
        expected = trial.lab.cold(prompt, _REPLY_TOKENS)
        if list(text) != expected:
            trial.wrong.append(f"a worker's prompt of {len(prompt)} tokens: got {text}, expected {expected}")
        trial.history = [*prompt, *expected]
    trial.acknowledged += said.snapshot_ids
    return said
