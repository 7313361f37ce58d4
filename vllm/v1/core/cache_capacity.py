# SPDX-License-Identifier: Apache-2.0
"""What a KV cache of given block sizes holds: vLLM's own grouping and packing, read off and added up.

The configuration needs the model's layers, or stubs that answer for their cache specs. No memory and no device is
needed: only the number of blocks depends on memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vllm.v1.core.block_sizes import BlockSizes
from vllm.v1.core.state_retention import LookupGrid
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec, iter_layer_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Kind = Literal["attention", "mamba", "scratch"]


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share a block table: a block of the pool holds a part for each.

    Attributes:
        kind: Blocks for every token, blocks for states, or one block a request that no lookup sees.
        layers: How many layers.
        block_tokens: Tokens of a block on one rank.
        ranks: Context-parallel ranks that tokens are spread over.
        padded_bytes: Bytes of one block that the group's layers take, with what stock pads each to.
        content_bytes: Bytes of these that hold something.
    """

    kind: Kind
    layers: int
    block_tokens: int
    ranks: int
    padded_bytes: int
    content_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens of a block over all ranks: the group's effective block size."""
        return self.block_tokens * self.ranks


@dataclass(frozen=True)
class CacheLayout:
    """How one rank's KV cache is cut up.

    Attributes:
        sizes: Tokens of an attention block on one rank, and of a recurrent one.
        block_bytes: Bytes of one block of the pool, whichever group uses it.
        groups: Every group, each drawing blocks from the one pool.
        grid: Where a prefix-cache lookup can resume.
        request_blocks: Tokens of a request -> blocks it needs, for the lengths that were asked for.
    """

    sizes: BlockSizes
    block_bytes: int
    groups: tuple[CacheGroup, ...]
    grid: LookupGrid
    request_blocks: dict[int, int]

    def of_kind(self, kind: Kind) -> list[CacheGroup]:
        return [group for group in self.groups if group.kind == kind]

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the pool that a token of a long request takes on one rank."""
        return sum(self.block_bytes / group.tokens for group in self.of_kind("attention"))

    @property
    def state_bytes(self) -> int:
        """Bytes of the pool that one retained state takes on one rank: a block in every recurrent group."""
        return len(self.of_kind("mamba")) * self.block_bytes

    @property
    def state_content_bytes(self) -> int:
        """Bytes of these that hold the state."""
        return sum(group.content_bytes for group in self.of_kind("mamba"))

    def waste(self, group: CacheGroup) -> int:
        """Bytes of a block that the group leaves unused."""
        return self.block_bytes - group.content_bytes

    def blocks(self, memory: int) -> int:
        """Blocks of a pool of `memory` bytes; vLLM sets one of them aside."""
        return memory // self.block_bytes

    def tokens_of_cache(self, memory: int, length: int) -> int:
        """What vLLM logs as the size of the cache: tokens of requests of `length` tokens that fit at once."""
        return int(self.blocks(memory) / self.request_blocks[length] * length)

    def requests(self, memory: int, length: int) -> int:
        """Whole requests of `length` tokens that fit at once."""
        return max(self.blocks(memory) - 1, 0) // self.request_blocks[length]


def measure(vllm_config: VllmConfig, lengths: tuple[int, ...] = (), block_outermost: bool = False) -> CacheLayout:
    """The layout that vLLM makes of the block sizes in `vllm_config`.

    Args:
        vllm_config: With its layers, and with the block sizes to measure.
        lengths: Request lengths to count blocks for; the longest request's is counted anyhow.
        block_outermost: Whether to insist on an order of dimensions that serves blocks of different sizes.

    Raises:
        ValueError: vLLM has no layout for these block sizes.
        NotImplementedError: The same.
    """
    # Here, not above: the gate's modules import this one before a worker exists.
    from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
    from vllm.v1.core.kv_cache_planning import _pool_bytes_per_block_from_builder

    groups = cache_groups(vllm_config, block_outermost)
    with resolved_layout(vllm_config, block_outermost):
        builder = get_kv_cache_config_builder(vllm_config)
        block_bytes = _pool_bytes_per_block_from_builder(builder, vllm_config, groups)
    ranks = vllm_config.parallel_config.decode_context_parallel_size
    described = tuple(_describe(group, ranks) for group in groups)
    lengths = (*lengths, vllm_config.model_config.max_model_len)
    (attention,) = {group.block_tokens for group in described if group.kind == "attention"}
    (mamba,) = {group.block_tokens for group in described if group.kind == "mamba"}
    return CacheLayout(
        sizes=BlockSizes(attention, mamba),
        block_bytes=block_bytes,
        groups=described,
        grid=layout_grid(vllm_config, groups),
        request_blocks={length: request_blocks(vllm_config, groups, length) for length in lengths},
    )


def cache_groups(vllm_config: VllmConfig, block_outermost: bool = False) -> list[KVCacheGroupSpec]:
    """The KV cache groups that vLLM makes of the layers in `vllm_config`."""
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    with resolved_layout(vllm_config, block_outermost):
        return get_global_kv_cache_groups(vllm_config, [get_kv_cache_spec(vllm_config)])


def layout_grid(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> LookupGrid:
    """Where a prefix-cache lookup of this fork can resume with these groups: what a scheduler's coordinator says."""
    from vllm.v1.core.boundary_attention import BoundaryAttentionManager
    from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, resolve_kv_cache_block_sizes
    from vllm.v1.core.lookup_grid import lookup_grid

    config = generate_scheduler_kv_cache_config([KVCacheConfig(1, [], groups)])
    scheduler_block, hash_block = resolve_kv_cache_block_sizes(config, vllm_config)
    speculative, lookahead = vllm_config.speculative_config, vllm_config.num_hash_lookahead_tokens
    coordinator = get_kv_cache_coordinator(
        config,
        max_model_len=vllm_config.model_config.max_model_len,
        max_in_flight_tokens=vllm_config.max_in_flight_tokens,
        # Hashes that look ahead make the drop needless.
        use_eagle=speculative is not None and speculative.use_eagle_block_drop() and not lookahead,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=vllm_config.parallel_config.decode_context_parallel_size,
        pcp_world_size=1,
        scheduler_block_size=scheduler_block,
        hash_block_size=hash_block,
        num_hash_lookahead_tokens=lookahead,
    )
    BoundaryAttentionManager.adopt_all(coordinator)
    return lookup_grid(coordinator)


@contextmanager
def resolved_layout(vllm_config: VllmConfig, block_outermost: bool = False) -> Iterator[None]:
    """Let vLLM resolve the order of the cache's dimensions, and forget it again: the engine core decides it."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.kv_cache_interface import KVCacheLayout
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    before = vllm_config.cache_config.kv_cache_layout
    backends = get_current_attn_backends(vllm_config)
    supported = get_supported_kv_cache_layouts(backends)
    if block_outermost:
        # Backends without a preference take any.
        indifferent = all(backend.supported_kv_cache_layouts() is None for backend in backends)
        supported = [layout for layout in (KVCacheLayout if indifferent else supported) if layout.is_block_outermost]
        if not supported:
            raise ValueError("this model's attention kernels take no blocks of different sizes")
    specs = get_kv_cache_spec(vllm_config)
    resolve_kv_cache_layout(vllm_config, [[layout.name for layout in supported]], specs.values())
    try:
        yield
    finally:
        vllm_config.cache_config.kv_cache_layout = before


@contextmanager
def block_sizes(vllm_config: VllmConfig, sizes: BlockSizes) -> Iterator[None]:
    """Try block sizes out: the configuration has them inside the `with`, and what it had before afterwards."""
    cache = vllm_config.cache_config
    before = cache.block_size, cache.mamba_block_size, cache.mamba_page_size_padded
    cache.block_size, cache.mamba_block_size, cache.mamba_page_size_padded = *sizes, None
    try:
        yield
    finally:
        cache.block_size, cache.mamba_block_size, cache.mamba_page_size_padded = before


def tokens_per_gib(vllm_config: VllmConfig, sizes: BlockSizes) -> int:
    """Tokens of cache that `sizes` would serve with a GiB on each rank, for requests of the longest length."""
    longest = vllm_config.model_config.max_model_len
    with block_sizes(vllm_config, sizes):
        layout = measure(vllm_config)
    return int(2**30 / (layout.block_bytes * layout.request_blocks[longest]) * longest)


def request_blocks(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec], length: int) -> int:
    """Blocks that vLLM reserves for a request of `length` tokens, over all groups."""
    model = vllm_config.model_config
    before = model.max_model_len
    model.max_model_len = length
    try:
        specs = [group.kv_cache_spec for group in groups]
        return sum(-(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes) for spec in specs)
    finally:
        model.max_model_len = before


def _describe(group: KVCacheGroupSpec, ranks: int) -> CacheGroup:
    spec = group.kv_cache_spec
    layer_specs = list(iter_layer_specs(spec))
    # A group of equal layers has one spec for all of them.
    copies = len(group.layer_names) // len(layer_specs)
    return CacheGroup(
        kind=_kind(layer_specs[0]),
        layers=len(group.layer_names),
        block_tokens=spec.block_size,
        ranks=ranks if spec.dcp_sharded else 1,
        padded_bytes=copies * sum(layer.page_size_bytes for layer in layer_specs),
        content_bytes=copies * sum(_content_bytes(layer) for layer in layer_specs),
    )


def _kind(spec: KVCacheSpec) -> Kind:
    if isinstance(spec, MambaSpec):
        return "mamba"
    return "attention" if spec.prefix_cacheable else "scratch"


def _content_bytes(spec: KVCacheSpec) -> int:
    return int(getattr(spec, "real_page_size_bytes", spec.page_size_bytes))
