# SPDX-License-Identifier: Apache-2.0
"""The model that `kda-prefill plan` and `kda-prefill layout` are about, from a config.json."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig

GLM_NAME = "GLM-5.3-Flash"
GLM_ARCHITECTURES = "Glm5Next"
"""How the names of its architectures begin."""

GLM_SHAPES: dict[str, Any] = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "model_type": "glm5_next",
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "glm5_next_text",
        "dtype": "bfloat16",
        "num_nextn_predict_layers": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "vision_config": {"model_type": "glm5_next_vision", "depth": 1},
    "tie_word_embeddings": False,
}
"""A GLM-5.3-Flash config.json: transformers' defaults are its layer shapes."""


def read_config(folder: Path | None) -> dict[str, Any]:
    """The model's config.json, GLM-5.3-Flash's where no folder is given.

    Raises:
        ValueError: The file cannot be read, is no JSON object, or names no architecture.
    """
    if folder is None:
        return GLM_SHAPES
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"its config.json cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise ValueError("its config.json is no JSON object")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ValueError("its config.json names no architecture; add the key architectures")
    return config


def architecture(folder: Path | None) -> str:
    """The model's first architecture.

    Raises:
        ValueError: As `read_config`.
    """
    return str(read_config(folder)["architectures"][0])


def model_problem(folder: Path | None, mtp: int, glm_only: bool) -> str:
    """What is wrong with the values of `--model` and `--mtp`, as one line; empty where vLLM can be asked.

    Args:
        folder: Of a config.json; None for GLM-5.3-Flash's shapes.
        mtp: Draft tokens of multi-token prediction, 0 for none.
        glm_only: Whether other hybrid models are refused.
    """
    if folder is not None and not (folder / "config.json").is_file():
        return f"--model {folder}: name a folder with a config.json in it"
    need = "; give one of a GLM5Next model" if glm_only else ""
    try:
        config = read_config(folder)
    except ValueError as error:
        return f"--model {folder}: {error}{need}"
    name, model_type = config["architectures"][0], config.get("model_type")
    is_glm = name.startswith(GLM_ARCHITECTURES)
    if glm_only and not is_glm:
        return f"--model {folder}: {name} has no KDA layers; use a GLM5Next model"
    if is_glm and not str(model_type).startswith(GLM_SHAPES["model_type"]):
        return f"--model {folder}: model_type {model_type!r} is not one of a GLM5Next model; give its own"
    problem = draft_problem(config) if mtp and is_glm else ""
    return problem and f"--mtp {mtp}: {problem}"


def draft_problem(config: dict[str, Any]) -> str:
    """Why vLLM makes no draft layers of a GLM5Next configuration; empty where it makes some.

    vLLM looks for draft layers where the model type is that of the whole model. A text-only configuration has another.

    Args:
        config: What `read_config` returned.
    """
    (whole,), model_type = GLM_SHAPES["architectures"], GLM_SHAPES["model_type"]
    text = config.get("text_config")
    layers = text.get("num_nextn_predict_layers") if isinstance(text, dict) else None
    is_whole = config.get("model_type") == model_type
    if is_whole and isinstance(layers, int) and layers > 0:
        return ""
    found = f"architecture {config['architectures'][0]}, model_type {config.get('model_type')!r}"
    if is_whole:
        found += ", no num_nextn_predict_layers in its text_config"
    return (
        f"this model has no draft layers that vLLM finds ({found}); give the config.json of the whole model "
        f"(architecture {whole}, model_type {model_type!r}, num_nextn_predict_layers in its text_config), or --mtp 0"
    )


class UnfitModelError(ValueError):
    """A config.json that vLLM cannot read; the message is one line and names the folder and the value."""


@contextmanager
def reading(folder: Path | None) -> Iterator[None]:
    """Around calls of vLLM that read the model's config.json; nothing of this fork runs inside.

    A bad value shows in many ways: transformers raises errors of its own, and others come from arithmetic.

    Raises:
        UnfitModelError: The folder was given, and what vLLM raised is none of its own refusals.
    """
    disabled = logging.root.manager.disable
    if disabled >= logging.WARNING:  # Without --verbose: what would be logged is raised as well.
        logging.disable(logging.ERROR)
    try:
        yield
    except (ValueError, NotImplementedError):
        raise
    except Exception as error:
        if folder is None:
            raise
        text = " ".join(str(error).split())
        raise UnfitModelError(f"--model {folder}: vLLM cannot read its config.json: {text}") from error
    finally:
        logging.disable(disabled)


@contextmanager
def model_folder(folder: Path | None) -> Iterator[Path]:
    """The folder to give vLLM; inside the `with`, a temporary one of GLM-5.3-Flash's shapes where none is given."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        Path(temporary, "config.json").write_text(json.dumps(GLM_SHAPES))
        yield Path(temporary)


def make_configs(
    folder: Path | None, *, tp: int, dcp: int, mtp: int, max_model_len: int | None, interleave: int = 1, **drafting: Any
) -> tuple[ModelConfig, ParallelConfig, SpeculativeConfig | None]:
    """vLLM's configurations of the model, the ranks and the drafts.

    Args:
        folder: Of a config.json; None for GLM-5.3-Flash's shapes.
        tp: Tensor parallel ranks.
        dcp: Decode context parallel ranks.
        mtp: Draft tokens of multi-token prediction, 0 for none.
        max_model_len: vLLM's `--max-model-len`, None for the model's own.
        interleave: vLLM's `--cp-kv-cache-interleave-size`.
        drafting: More of `--speculative-config`, where there are drafts.

    Raises:
        ValueError: vLLM cannot serve this model, or makes no draft layers of it.
    """
    # The platform first: see there.
    import vllm_kda_prefill.planning_platform  # noqa: F401  # isort: skip

    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig

    problem = draft_problem(read_config(folder)) if mtp else ""
    if problem:
        raise ValueError(f"--mtp {mtp}: {problem}")
    length: Any = max_model_len
    parallel = ParallelConfig(
        tensor_parallel_size=tp, decode_context_parallel_size=dcp, cp_kv_cache_interleave_size=interleave
    )
    with model_folder(folder) as path, reading(folder):
        model = ModelConfig(model=str(path), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=length)
        if not mtp:
            return model, parallel, None
        speculative = SpeculativeConfig(
            method="mtp",
            num_speculative_tokens=mtp,
            target_model_config=model,
            target_parallel_config=parallel,
            **drafting,
        )
    return model, parallel, speculative
