# SPDX-License-Identifier: Apache-2.0
"""Which block sizes an engine gets, and which are refused: before its weights load, and in a worker afterwards.

One table has the settings, the engine and the GPU, and what follows: final block sizes, or a message. Every row is
asked both ways.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.glm_engines import SHAPES, align, aligned, size_setter, unaligned

from vllm_kda_prefill.layer_stubs import as_gpu  # isort: skip  (the platform before vLLM)

from vllm.kda_prefill_variables import GATE, SPLIT_MAMBA, SPLIT_TARGET
from vllm.platforms import current_platform
from vllm.plugins.kda_prefill_coalescing import block_layout, config_check, index_rows

STOCK_BLOCKS = {
    (1, "auto", 0): 4608,
    (1, "auto", 3): 4608,
    (1, "fp8", 0): 8704,
    (1, "fp8", 3): 9216,
    (2, "auto", 0): 2560,
    (2, "auto", 3): 2560,
    (2, "fp8", 0): 4608,
    (2, "fp8", 3): 4608,
    (4, "auto", 0): 1536,
    (4, "auto", 3): 1536,
    (4, "fp8", 0): 2560,
    (4, "fp8", 3): 2560,
    (8, "auto", 0): 1024,
    (8, "auto", 3): 1024,
    (8, "fp8", 0): 1536,
    (8, "fp8", 3): 1536,
}
"""Tensor parallel ranks, the cache's dtype and draft tokens -> the block that stock raises attention's to."""

FIX = f"set {SPLIT_TARGET} and {SPLIT_MAMBA} to 512 and 512, or to auto"
COARSE = "Mamba blocks of {} tokens leave {} boundaries inside a span of 8192 tokens, .*: {}$"


class Case(NamedTuple):
    """A row of the table.

    Attributes:
        settings: The two variables; None where neither is set.
        engine: Tensor and decode context parallel ranks, the cache's dtype, draft tokens.
        blocks: Final attention and Mamba block; None where the engine is refused with the gate on or off.
        unmet: What the configuration check says, in order, as patterns.
        capability: Major compute capability.
        block_size: `--block-size`, where it is given.
        refused: What a worker says where the engine is refused, if it is not what the configuration check says.
    """

    settings: tuple[int | str, int | str] | None
    engine: tuple[int, int, str, int]
    blocks: tuple[int, int] | None
    unmet: tuple[str, ...] = ()
    capability: int = 9
    block_size: int | None = None
    refused: str = ""

    def __str__(self) -> str:
        tp, dcp, dtype, mtp = self.engine
        sizes = "stock" if self.settings is None else "{}/{}".format(*self.settings)
        given = f"-block{self.block_size}" if self.block_size else ""
        return f"{sizes}-TP{tp}-DCP{dcp}-{dtype}-MTP{mtp}-SM{self.capability}{given}"


def too_coarse(block: int, fix: str = FIX) -> tuple[str, ...]:
    """What is said of Mamba blocks of these many tokens, if anything."""
    boundaries = 8191 // block
    return (COARSE.format(block, boundaries, re.escape(fix)),) if boundaries < 4 else ()


def stock(tp: int, dcp: int, dtype: str, mtp: int) -> Case:
    block = STOCK_BLOCKS[tp, dtype, mtp]
    return Case(None, (tp, dcp, dtype, mtp), (block, block), too_coarse(block))


def multiple(size: int, unit: int, nearest: str) -> tuple[str, ...]:
    return (
        f"^{SPLIT_TARGET}={size} is not a multiple of {unit} tokens, which this engine's attention kernels need; "
        f"{nearest}$",
    )


def contradiction(setting: int | str, block_size: int, blocks: str) -> str:
    return (
        f"^--block-size {block_size} contradicts {SPLIT_TARGET}={setting}, which makes blocks of {blocks} tokens: "
        "leave one out$"
    )


NO_PAIR = "leave no pair to choose that keeps 8,192-token spans coalesced; those that do: 512/512, 512/1024, 1024/1024$"
MAIN = (4, 4, "fp8", 3)
RAISED = (4, 1, "fp8", 0)

CASES = [
    # Without the settings: what stock makes.
    *(stock(tp, dcp, dtype, mtp) for (tp, dcp), dtype, mtp in SHAPES),
    stock(8, 8, "auto", 3),
    stock(8, 8, "fp8", 3),
    Case(None, MAIN, (2560, 2560), too_coarse(2560), capability=12),
    # A small --block-size does not avoid the raise, and a larger one is its step.
    Case(None, RAISED, (2560, 2560), too_coarse(2560), block_size=64),
    Case(None, RAISED, (2560, 2560), too_coarse(2560), block_size=768),
    Case(None, RAISED, (4096, 4096), too_coarse(4096), block_size=2048),
    # Sizes that work.
    *(Case((512, 512), (tp, dcp, dtype, mtp), (512, 512)) for (tp, dcp), dtype, mtp in SHAPES),
    Case((512, 1024), MAIN, (512, 1024)),
    Case((1024, 1024), MAIN, (1024, 1024)),
    Case((1536, 1536), MAIN, (1536, 1536)),
    Case((512, 512), MAIN, (512, 512), capability=10),
    Case((512, 512), MAIN, (512, 512), capability=12),
    Case((512, 1024), MAIN, (512, 1024), capability=12),
    Case((1536, 1536), MAIN, (1536, 1536), capability=12),
    Case((1024, 1024), MAIN, (1024, 1024), capability=12),
    Case((512, 512), MAIN, (512, 512), block_size=512),
    # `auto`, alone and beside a number.
    Case(("auto", "auto"), MAIN, (1024, 1024)),
    Case((512, "auto"), MAIN, (512, 512)),
    Case(("auto", 512), MAIN, (512, 512)),
    Case(("auto", 1024), MAIN, (1024, 1024)),
    Case(("auto", "auto"), MAIN, (1024, 1024), capability=12),
    Case(("auto", "auto"), MAIN, (1024, 1024), block_size=1024),
    # Sizes that work with the gate off only.
    Case((512, 2048), MAIN, (512, 2048), too_coarse(2048)),
    Case((1024, 2048), MAIN, (1024, 2048), too_coarse(2048), capability=12),
    Case((2048, 2048), MAIN, (2048, 2048), too_coarse(2048), capability=12),
    # Sizes that cannot work.
    Case((128, 512), MAIN, None, multiple(128, 512, "the nearest is 512")),
    Case((640, 640), MAIN, None, multiple(640, 512, "the nearest that work are 512 and 1024")),
    Case((640, 640), MAIN, None, multiple(640, 512, "the nearest that work are 512 and 1024"), capability=12),
    Case(("auto", 2560), MAIN, None, (NO_PAIR, *too_coarse(2560))),
    Case(("auto", 2048), MAIN, None, (NO_PAIR, *too_coarse(2048))),
    Case((2048, "auto"), MAIN, None, (NO_PAIR,)),
    # A --block-size that says something else.
    Case((512, 512), MAIN, None, (contradiction(512, 1024, "512"),), block_size=1024),
    Case((512, 512), (1, 1, "auto", 0), None, (contradiction(512, 1024, "512"),), block_size=1024),
    Case(("auto", 512), MAIN, None, (contradiction("auto", 1024, "512"),), block_size=1024),
    Case(
        ("auto", "auto"),
        MAIN,
        None,
        (contradiction("auto", 768, "512 or 1024"),),
        block_size=768,
        # A worker knows which one `auto` chose.
        refused=contradiction("auto", 768, "1024"),
    ),
]


@pytest.fixture(autouse=True)
def set_sizes(monkeypatch):
    with index_rows.bound():
        yield size_setter(monkeypatch)


def check_patterns(messages: list[str], patterns: tuple[str, ...]) -> None:
    assert len(messages) == len(patterns), messages
    for message, pattern in zip(messages, patterns, strict=True):
        assert re.search(pattern, message), message
        assert "\n" not in message


@pytest.mark.parametrize("case", CASES, ids=str)
def test_block_sizes(case, set_sizes, monkeypatch):
    if case.settings:
        set_sizes(*case.settings)
    options = {"block_size": case.block_size, "capability": case.capability}
    with as_gpu(case.capability):
        config = unaligned(*case.engine, **options)
        unit = block_layout.attention_unit(config)
        assert unit == block_layout.kernel_unit(config, current_platform._find_non_ssm_backends(config))
        assert unit == 512
        check_patterns(list(block_layout.unmet_by_layout(config)), case.unmet)
        foreseen = block_layout.foreseen_mamba_block(config, block_layout.read_settings(), unit)
        if case.blocks is None:
            with pytest.raises(ValueError, match=case.refused or case.unmet[0]) as error:
                align(config)
            check_patterns([str(error.value)], (case.refused or case.unmet[0],))
            return
        # The gate is off: coarse blocks are served.
        align(config)
        assert (config.cache_config.block_size, config.cache_config.mamba_block_size) == case.blocks
        assert foreseen in (case.blocks[1], None)
        assert (foreseen is None) == bool(case.settings and case.settings[1] == "auto")
        monkeypatch.setenv(GATE, "1")
        config = unaligned(*case.engine, **options)
        if not case.unmet:
            align(config)
            return
        with pytest.raises(ValueError, match=f"^{GATE}=1, but this engine cannot coalesce KDA prefill: ") as error:
            align(config)
        check_patterns([str(error.value)], case.unmet)


@pytest.mark.parametrize(("capability", "dtype", "block"), [(9, "auto", 1536), (12, "auto", 2560), (12, "fp8", 2560)])
def test_a_dtype_that_layers_will_settle_is_foreseen(capability, dtype, block):
    with as_gpu(capability):
        config = unaligned(4, 4, dtype, 3, capability=capability)
        config.cache_config.cache_dtype = dtype
        assert block_layout.foreseen_mamba_block(config, None, 512) == block
        # The layers settle it, and the worker's alignment follows them.
        config = unaligned(4, 4, dtype, 3, capability=capability)
        align(config)
    assert config.cache_config.mamba_block_size == block


def test_the_start_up_error_carries_it():
    with as_gpu(9):
        config = unaligned(*MAIN)
        with pytest.raises(ValueError, match=f"Mamba blocks of 2560 tokens.*{SPLIT_TARGET} and {SPLIT_MAMBA}"):
            config_check.check(config)


@pytest.mark.parametrize(("shape", "end"), [((4, "auto"), 7680), ((8, "auto"), None)])
def test_blocks_that_do_not_fill_the_budget_get_a_warning(monkeypatch, shape, end):
    warnings = []
    monkeypatch.setattr(block_layout.logger, "warning_once", lambda message, *args: warnings.append(message % args))
    with as_gpu(9):
        config_check.check(unaligned(shape[0], 1, shape[1], 3))
    assert [f"at {end} of 8192 tokens" in warning for warning in warnings] == ([True] if end else [])


def test_auto_logs_what_it_weighed(monkeypatch, set_sizes):
    lines = []
    monkeypatch.setattr(block_layout.logger, "info_once", lambda message, *args: lines.append(message % args))
    set_sizes("auto", "auto")
    config = aligned(*MAIN)
    assert re.search(
        "auto chose 1024/1024; tokens of cache .* in requests of 16384 tokens: "
        r"512/512 [\d,]+, 512/1024 [\d,]+, 1024/1024 [\d,]+$",
        lines[0],
    )
    # The engine core resolves the order of the cache's dimensions, not the choice.
    assert config.cache_config.kv_cache_layout is None


@pytest.mark.parametrize(("architecture", "mode"), [("Qwen3NextForCausalLM", "align"), ("Glm5NextForCausalLM", "none")])
def test_other_models_and_modes_are_refused(set_sizes, architecture, mode):
    set_sizes(512, 512)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(architecture=architecture),
        cache_config=SimpleNamespace(mamba_cache_mode=mode),
    )
    with pytest.raises(ValueError, match=f"serves {architecture} in Mamba cache mode {mode}: unset both"):
        block_layout.apply(config, 512)


@pytest.mark.parametrize(
    ("sizes", "interleave", "said"),
    [
        ((512, 512), 16, None),
        ((512, 512), 512, None),
        ((512, 1024), 1024, "every 1024 tokens, .* block of 512: pass --cp-kv-cache-interleave-size 512$"),
        ((512, 512), 48, "every 48 tokens, .* block of 512: pass --cp-kv-cache-interleave-size 16$"),
        (("auto", "auto"), 1024, "every 1024 tokens, .* block of 512: pass"),
        (None, 1024, "every 1024 tokens, .* block of 2560: pass --cp-kv-cache-interleave-size 512$"),
    ],
)
def test_ranks_that_take_turns_inside_a_block_share_it_evenly(set_sizes, sizes, interleave, said):
    if sizes is not None:
        set_sizes(*sizes)
    with as_gpu(9):
        config = unaligned(4, 4, "fp8")
        config.parallel_config.cp_kv_cache_interleave_size = interleave
        problems = [line for line in block_layout.unmet_by_layout(config) if "take turns" in line]
        config.parallel_config.decode_context_parallel_size = 1
        assert not [line for line in block_layout.unmet_by_layout(config) if "take turns" in line]
    assert len(problems) == (said is not None)
    assert not problems or re.search(said, problems[0])
