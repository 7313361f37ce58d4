# SPDX-License-Identifier: Apache-2.0
"""What block sizes hold, through vLLM's own alignment, grouping, packing, scheduler and KV cache manager.

Every size follows from GLM-5.3-Flash's configuration: its layers are vLLM's own classes without weights.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.glm_engines import SHAPES, aligned, size_setter

from vllm_kda_prefill.planning import Engine  # isort: skip  (the platform before vLLM)

from vllm.config import VllmConfig
from vllm.plugins.kda_prefill_coalescing import block_layout, index_rows
from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view
from vllm.v1.core.cache_capacity import cache_groups, measure, resolved_layout
from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
from vllm.v1.core.kv_cache_planning import get_kv_cache_configs
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_capacity,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache, select_common_block_size
from vllm_kda_prefill.layer_stubs import as_gpu
from vllm_kda_prefill.model_config import GLM_SHAPES
from vllm_kda_prefill.spans import QuerySpan, query_span

MEMORY = 2 << 30
ROW_BYTES_ON_SM12X = 656
"""Of a token: 512 values in fp8, their scales, and room for 64 positions in bf16 that this model does not use."""

REPLAY = {1: (7168, 7680), 2: (6144, 7168, 7680), 4: (4096, 6144, 7168, 7680)}
LADDER = {1: (4096, 6144, 7168, 7680), 2: (4096, 6144, 7168, 7680), 4: (4096, 6144, 7168, 7680)}


@pytest.fixture(autouse=True)
def split(monkeypatch):
    with index_rows.bound():
        yield size_setter(monkeypatch)


def served(config: VllmConfig, memory: int = MEMORY) -> KVCacheConfig:
    """The scheduler's KV cache configuration, as the engine core derives it."""
    specs = get_kv_cache_spec(config)
    with resolved_layout(config):
        return generate_scheduler_kv_cache_config(get_kv_cache_configs(config, [specs], [memory], cache_groups(config)))


@dataclass
class ServedLayout:
    """What `Engine.build` asks of a layout, with everything derived from the model."""

    config: VllmConfig
    retention_interval: int | None = 0

    @property
    def mtp(self) -> int:
        return self.config.num_speculative_tokens

    def vllm_config(self, asynchronous: bool = False) -> VllmConfig:
        return self.config

    def kv_cache_config(self) -> KVCacheConfig:
        kv_cache_config = served(self.config)
        self.config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        return kv_cache_config


def engine(config: VllmConfig, policy: Any) -> Engine:
    return Engine.build(ServedLayout(config), policy=policy)  # type: ignore[arg-type]


def serve(engine: Engine, name: str, tokens: list[int]):
    """The spans of a prompt's queries."""
    engine.add(name, tokens)
    spans = []
    while engine.scheduler.has_unfinished_requests():
        output = engine.scheduler.schedule()
        spans.append(query_span(engine, output, name))
        engine.answer(output)
    return spans


# Without the settings.


def test_stocks_scheduler_block_is_10240_tokens():
    config = aligned(4, 4, "fp8", 3)
    assert (config.cache_config.block_size, config.cache_config.mamba_block_size) == (2560, 2560)
    scheduler_block, _ = resolve_kv_cache_block_sizes(served(config), config)
    assert scheduler_block == 10240


# With the settings.


@pytest.mark.parametrize(("ranks", "dtype", "mtp"), SHAPES)
def test_512_token_blocks_coalesce_8k_into_one_span(split, ranks, dtype, mtp):
    split(512, 512)
    dcp = ranks[1]
    config = aligned(ranks[0], ranks[1], dtype, mtp)
    for policy, positions in (("replay", REPLAY), ("ladder", LADDER)):
        built = engine(config, policy)
        grid = built.scheduler.retention.grid  # type: ignore[attr-defined]
        assert (grid.mamba_block, grid.hit_alignment, grid.scheduler_block) == (512, 512, 512 * dcp)
        assert measure(config).grid == grid
        built.add("prompt", list(range(8192)))
        span = query_span(built, built.scheduler.schedule(), "prompt")
        assert span == QuerySpan(0, 8192, positions[dcp])


@pytest.mark.parametrize(
    ("sizes", "positions", "hit"), [((512, 1024), (4096, 6144, 7168), 7168), ((1024, 1024), (4096, 6144, 7168), 7168)]
)
def test_a_pair_of_other_sizes_is_served_and_hit(split, sizes, positions, hit):
    split(*sizes)
    config = aligned(4, 4, "fp8", 3)
    assert (config.cache_config.block_size, config.cache_config.mamba_block_size) == sizes
    built = engine(config, "ladder")
    (span,) = serve(built, "prompt", list(range(8192)))
    assert span.checkpoints == positions
    again = serve(built, "again", list(range(8192)))
    assert again[0].start == hit


def test_groups_and_capacity_are_those_of_a_real_engine(split, tmp_path):
    """Figures of an engine on an H200: eight layers, TP1, bf16, three draft tokens, 14.74 GiB of cache."""
    split(512, 512)
    text = {**GLM_SHAPES["text_config"], "num_hidden_layers": 8}
    (tmp_path / "config.json").write_text(json.dumps({**GLM_SHAPES, "text_config": text}))
    config = aligned(mtp=3, max_model_len=40000, model=tmp_path)
    layout = measure(config)
    assert sorted(group.tokens for group in layout.groups) == [32] + [512] * 7
    assert layout.tokens_of_cache(int(14.74 * 2**30), 40000) == 1_215_517


@pytest.mark.parametrize("sizes", [None, (512, 512), (512, 1024), (1024, 1024)])
def test_capacity_is_what_vllm_reports(split, sizes):
    if sizes:
        split(*sizes)
    config = aligned(4, 4, "fp8", 3)
    kv_cache_config = served(config)
    layout = measure(config)
    assert layout.blocks(MEMORY) == kv_cache_config.num_blocks
    assert layout.tokens_of_cache(MEMORY, 16384) == get_kv_cache_capacity(config, kv_cache_config)[0]
    assert layout.block_bytes * layout.blocks(MEMORY) == kv_cache_config.kv_cache_tensors[0].size


def test_both_blocks_keep_their_own_bytes(split):
    split(512, 512)
    layout = measure(aligned(4, 4, "fp8", 3))
    (attention,) = layout.of_kind("attention")
    # 12 MLA layers of 512 bytes a token, and their indexers of 132 bytes for 16 tokens.
    assert attention.content_bytes == attention.padded_bytes == 12 * (512 * 512 + 32 * 132)
    state = 16 * 128 * 128 * 4 + 6 * 3 * 16 * 128 * 2
    assert {group.content_bytes for group in layout.of_kind("mamba")} == {2 * state}
    assert layout.state_content_bytes == 34 * state
    assert layout.block_bytes == attention.padded_bytes
    assert layout.waste(layout.of_kind("mamba")[0]) == layout.block_bytes - 2 * state


# auto.


@pytest.mark.parametrize(("ranks", "dtype"), [((1, 1), "auto"), ((1, 1), "fp8"), ((4, 4), "fp8"), ((8, 4), "fp8")])
def test_auto_serves_the_most_tokens_of_cache(split, ranks, dtype, monkeypatch):
    lines = []
    monkeypatch.setattr(block_layout.logger, "info_once", lambda message, *args: lines.append(message % args))
    split("auto", "auto")
    config = aligned(ranks[0], ranks[1], dtype, 3)
    chosen = measure(config)
    capacity = {}
    for sizes in ((512, 512), (512, 1024), (1024, 1024)):
        split(*sizes)
        capacity[sizes] = measure(aligned(ranks[0], ranks[1], dtype, 3)).tokens_of_cache(24 << 30, 16384)
    assert chosen.tokens_of_cache(24 << 30, 16384) == max(capacity.values())
    # Of pairs that serve as many, the finest.
    assert tuple(chosen.sizes) == max(capacity, key=capacity.__getitem__)
    assert f"auto chose {chosen.sizes.attention}/{chosen.sizes.mamba};" in lines[0]
    assert all(f"{attention}/{mamba} " in lines[0] for attention, mamba in capacity)
    # The engine core resolves the order of the cache's dimensions, not the choice.
    assert config.cache_config.kv_cache_layout is None


# The pooled indexer.


@pytest.mark.parametrize(
    ("capability", "sizes", "rows"),
    [
        (9, None, 32),
        (9, (512, 512), 32),
        (9, (1024, 1024), 64),
        (9, (1536, 1536), 32),
        (10, (512, 512), 32),
        (12, (512, 512), 32),
        (12, (512, 1024), 32),
        (12, (1024, 1024), 64),
        (12, (2048, 2048), 64),
    ],
)
def test_index_rows_stay_addressable(split, capability, sizes, rows):
    """The indexer's kernel reads blocks of 32 or 64 rows; each is a whole block of the right layer's cache."""
    if sizes:
        split(*sizes)
    config = aligned(4, 4, "fp8", 3, capability=capability)
    specs = get_kv_cache_spec(config)
    with as_gpu(capability), resolved_layout(config):
        layout = config.cache_config.get_resolved_kv_cache_layout()
        groups = cache_groups(config)
        (kv_cache_config,) = get_kv_cache_configs(config, [specs], [MEMORY], groups)
        builder = get_kv_cache_config_builder(config)
        small = builder.get_kv_cache_config_from_groups(config, kv_cache_config.kv_cache_groups, 3)
        caches = allocate_kv_cache(small, torch.device("cpu"), layout)
        names = [name for name in specs if name.endswith("indexer.k_cache")]
        for number, name in enumerate(names, start=1):
            backend = config.compilation_config.static_forward_context[name].get_attn_backend()
            spec, cache = specs[name], caches[name]
            size = select_common_block_size(spec.block_size, [backend], [spec])
            group = AttentionGroup(backend, [name], spec, 0, kernel_block_size=size)
            kernel_blocks = group.map_kv_cache_to_kernel_blocks(cache)
            assert kernel_blocks.shape[-2] == rows
            per_block = spec.block_size // size
            stride = group.kernel_block_stride or per_block
            for block, part in itertools.product(range(3), range(per_block)):
                kernel_blocks[block * stride + part].fill_(number)
    for number, name in enumerate(names, start=1):
        assert (caches[name] == number).all(), f"{name} was overwritten or not reached"
    others = [caches[name] for name in specs if name.endswith("mla_attn")]
    assert all((cache == 0).all() for cache in others)
    for cache in others if capability == 12 else ():
        # As FLASHINFER_MLA_SPARSE_SM120 reads it: blocks of 64 tokens, whole ones from block to block.
        tokens, stride = flat_kv_row_view(cache.squeeze(1), cache.shape[2])
        assert tokens.shape[0] % 64 == stride % 64 == 0
        assert tokens.shape[1] == ROW_BYTES_ON_SM12X


def test_with_the_gate_off_coarse_blocks_are_served(split):
    split(512, 2048)
    config = aligned(4, 4, "fp8", 3)
    (mamba,) = {
        group.kv_cache_spec.block_size
        for group in served(config).kv_cache_groups
        if isinstance(group.kv_cache_spec, MambaSpec)
    }
    assert mamba == 2048
