"""What LangChain is told that a model can do, without loading its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from dlite_agent.config import Settings

if TYPE_CHECKING:
    from langchain_core.language_models.model_profile import ModelProfile


def text_profile() -> ModelProfile:
    """Return what every model can do here; its context's length is the model's own."""
    return {
        "text_inputs": True,
        "image_inputs": False,
        "image_url_inputs": False,
        "audio_inputs": False,
        "video_inputs": False,
        "pdf_inputs": False,
        "image_tool_message": False,
        "pdf_tool_message": False,
        "text_outputs": True,
        "image_outputs": False,
        "audio_outputs": False,
        "video_outputs": False,
        "attachment": False,
        "tool_calling": True,
        "tool_choice": True,
        "tool_call_streaming": True,
        "structured_output": True,
        "temperature": True,
    }


def context_length(model: str, settings: Settings) -> int | None:
    """Return the positions of a model that is on this machine, or None if that is not known before it is loaded."""
    for folder in (Path(model).expanduser(), settings.models_dir / model):
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        length = config.get("max_position_embeddings") if isinstance(config, dict) else None
        if isinstance(length, int):
            return length
    return None
