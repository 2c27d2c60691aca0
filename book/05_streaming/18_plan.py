# %% [markdown]
# # 5.18 The dial: bytes to plan
#
# [5.17 What a process has, and what it may still have](17_memory.ipynb) · [contents](../README.md) · [5.19 The trunk on a faster disk](19_pack.ipynb)

# %% [markdown]
# ## 5.18.1 The plan
#
# A budget $R$ is spent in the order of what a byte saves. First what nothing runs without: interpreter and kernels, KDA
# state, latent cache, vectors, activations, a ring of row blocks, a few slots for experts to pass through. Then the
# trunk from the front of the walk: a pinned byte saves one byte of reading on **every** token. What is left when all of
# it is pinned becomes slots that keep experts, where a byte saves something only if its expert is chosen again
# (5.16.8).
#
# | part | bytes | in K3 |
# |---|---|---|
# | KDA state and history | $4\,L_{kda}\,P\,(d + 3(c-1))$ | 434 + 31 MB, at any length |
# | latent cache | $4\,L_{mla}\,(r + e)$ a position | 55 KB a position |
# | trunk | pinned or streamed | 108.8 GB |
# | one expert | | 17.5 MB, of which there are 82,432 |

# %% tags=["export"]
import dataclasses
import os
from k3lib.parallel import CORES
from k3lib.fileio import UsageError
from k3lib.tensors import forward_order, is_matrix, is_router, row_multiples
from k3lib.disk import PAGE, enough_readers, page_padded, read_rates
from k3lib.layout import expert_slot_bytes, router_buffers, row_blocks, streaming_slot_bytes
from k3lib.memory import available_bytes, resident_bytes, shown_size, status_bytes


# %% tags=["export"]
class PlanError(UsageError):
    "A budget that does not hold the model: says what is short and what would do; `least` is that number of bytes."

    def __init__(self, least, message):
        super().__init__(message)
        self.least = least


JIT_RSS = 28_000_000  # private memory of compiled kernels and their threads, after the first pass


LIBRARY_RSS, LIBRARY_RSS_GROWTH = 97_000_000, 12_000_000  # pages of library files in memory by then; or, where most were before, how many more


BUFFER_BYTES = 2 << 20  # bytes of a ring slot, and of a block that is read ahead


READ_BYTES = 250  # of one entry in the list of reads


READERS = 5  # each with a slot at hand; at least: never fewer than arithmetic threads


READ_AHEAD = 3  # row blocks that wait for their matrix: more would have left the cache by then


MAX_CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Plan:
    "What a budget is spent on. `parts`: {what: bytes}; the rest are the choices that follow."
    ram: int
    parts: dict
    pinned: frozenset
    pinned_bytes: int
    trunk_bytes: int
    slots: int
    slot_bytes: int
    expert_slots: int
    expert_slot_bytes: int
    readers: int
    context: int
    chunk: int

    @property
    def total(self):
        return sum(self.parts.values())

    def as_dict(self):
        keys = ("ram", "slots", "slot_bytes", "expert_slots", "expert_slot_bytes", "readers", "context", "chunk", "pinned_bytes", "trunk_bytes")
        return {"total": self.total, "parts": dict(self.parts), **{k: getattr(self, k) for k in keys}}

    def text(self):
        "The plan as a table."
        rows = [f"  {what:<44}{shown_size(n):>12}" for what, n in self.parts.items()]
        head = f"plan for {shown_size(self.ram)} of memory, {self.context} positions, prompts in chunks of {self.chunk}"
        share = 100 * self.pinned_bytes / self.trunk_bytes
        return "\n".join([head, *rows, f"  {'together':<44}{shown_size(self.total):>12}",
                          f"  {share:.1f}% of the streamed weights pinned, {self.expert_slots} expert slots"])


def activation_bytes(config, tokens):
    "Upper estimate of what a pass over `tokens` tokens allocates: every array of the widest layer, float32."
    c = config
    kda = 8 * c.kda_num_heads * c.kda_head_dim
    mla = c.num_attention_heads * (2 * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim) + 2 * c.kv_lora_rank)
    moe = (c.num_experts_per_token * c.routed_expert_hidden_size + 3 * c.num_shared_experts * c.moe_intermediate_size
           + 4 * c.num_experts + 6 * c.moe_intermediate_size)
    blocks = -(-c.num_hidden_layers // c.attn_res_block_size)
    row = (blocks + 7) * c.hidden_size + max(kda, mla, moe, 4 * c.intermediate_size)
    return 4 * tokens * row + 8 * c.vocab_size + (1 << 20)


def state_bytes(config):
    "Bytes of recurrent state and convolution history of the KDA layers, at any length."
    c = config
    width = c.kda_num_heads * c.kda_head_dim
    return 4 * len(c.kda_layers) * (width * c.kda_head_dim + 3 * width * (c.kda_conv_kernel - 1))


def position_bytes(config):
    "Bytes the latent cache grows by with each position."
    return 4 * len(config.mla_layers) * (config.kv_lora_rank + config.qk_rope_head_dim)


def make_plan(config, checkpoint, ram, context, prompt_tokens=None, threads=CORES, readers=None):
    """Spend `ram` bytes: fixed costs, state, cache, ring, then the trunk from the front of the walk, then expert slots.

    Raises PlanError with the smallest budget that would do. Nothing large is allocated here.
    """
    extents = {name: checkpoint.extent(name) for name in forward_order(config)}
    streams = {name: e for name, e in extents.items() if is_matrix(name, e)}
    trunk = sum(page_padded(e.nbytes) for e in streams.values())
    readers = max(READERS if readers is None else readers, threads)
    slots = readers + READ_AHEAD
    slot, ring = _buffer_bytes({name: e for name, e in streams.items() if not is_router(name)}, row_multiples(config), slots)
    ring += _router_bytes([e for name, e in streams.items() if is_router(name)])
    first_moe = config.first_k_dense_replace
    an_expert = list(checkpoint.expert(first_moe, 0).values()) if first_moe < config.num_hidden_layers else []
    whole, passing = (expert_slot_bytes(an_expert), streaming_slot_bytes(an_expert)) if an_expert else (1, 0)
    expert, experts = min(whole, passing), expert_readers(config, readers) if an_expert else 0

    now = resident_bytes() or 150_000_000
    fixed = {
        "interpreter, libraries, checkpoint index": now,
        "compiled kernels and threads": JIT_RSS + max(LIBRARY_RSS_GROWTH, LIBRARY_RSS - (status_bytes("RssFile") or LIBRARY_RSS)),
        "KDA state": state_bytes(config),
        f"latent cache, {context} positions": context * position_bytes(config),
        "vectors and convolutions": sum(_vector_bytes(e) for name, e in extents.items() if name not in streams),
    }
    least = sum(fixed.values()) + activation_bytes(config, 1) + ring + experts * expert
    if ram < least:
        raise PlanError(least, f"a budget of {shown_size(ram)} is {shown_size(least - ram)} short: with {shown_size(now)} that this process already holds, this model with {context} positions "
                        f"needs at least {_enough(least)} MB")
    chunk = min(MAX_CHUNK, prompt_tokens or MAX_CHUNK)
    while chunk > 1 and activation_bytes(config, chunk) > activation_bytes(config, 1) + (ram - least) // 4:
        chunk //= 2
    left = ram - least + activation_bytes(config, 1) - activation_bytes(config, chunk)
    if left + ring >= trunk:
        left, ring, slots = left + ring, 0, 0
    pinned, pinned_bytes = _front(streams, left)
    left -= pinned_bytes
    if (len(pinned) == len(streams) or whole == expert) and left + experts * expert >= (experts + 1) * whole:
        all_experts = config.num_experts * (config.num_hidden_layers - first_moe)
        expert, experts = whole, min((left + experts * expert) // whole, all_experts + experts)  # one a reader keeps nothing
    parts = {**fixed, f"activations, chunks of {chunk}": activation_bytes(config, chunk), "row block buffers": ring,
             "pinned trunk": pinned_bytes, f"expert slots, {experts}": experts * expert}
    plan = Plan(ram, parts, pinned, pinned_bytes, max(trunk, 1), slots, slot, experts, expert, readers, context, chunk)
    free = available_bytes()
    if free is not None and plan.total - now > free:
        fits = int(0.99 * (now + free))  # what is free changes while it is looked at
        advice = f"a budget of {fits // 10**6} MB would fit" if fits > least else f"not even the smallest budget, {_enough(least)} MB, would fit"
        raise PlanError(None, f"the plan takes {shown_size(plan.total - now)} more, but only {shown_size(free)} of memory are free here: {advice}")
    return plan


def expert_readers(config, readers):
    "The fewest of `readers` that take the experts of a token in as many rounds: with one more, the last round would be one expert's, and one core's."
    chosen = config.num_experts_per_token
    return -(-chosen // -(-chosen // readers))


def measured_readers(checkpoint, threads=CORES):
    "(readers, one line on why): as many as keep the device of the largest shard busy, and one for each thread of arithmetic."
    rates = read_rates(max(checkpoint.files, key=os.path.getsize))
    enough = enough_readers(rates)
    shown = ", ".join(f"{n}: {rate / 1e9:.2f}" for n, rate in rates.items())
    return enough + threads, f"GB/s by readers: {shown}; {enough} keep the device busy while {threads} multiply: --readers {enough + threads}"


def _buffer_bytes(streams, multiples, slots):
    "(bytes of a slot, bytes of `slots` of them and of the list of reads) for the matrices `streams`, {name: extent}."
    if not streams:
        return 0, 0
    widest = max(multiples.get(name, 1) * (e.nbytes // e.shape[0]) for name, e in streams.items())
    slot = max(min(BUFFER_BYTES, max(page_padded(e.nbytes) + PAGE for e in streams.values())), page_padded(widest) + PAGE)
    reads = sum(len(row_blocks(e, multiples.get(name, 1), slot, "")) for name, e in streams.items())
    return slot, slots * slot + READ_BYTES * reads


def _router_bytes(extents):
    "Bytes of the ring of the matrices that come early, and of its list of reads."
    if not extents:
        return 0
    slots, slot = router_buffers(extents)
    return slots * (slot + READ_BYTES * len(extents))


def _vector_bytes(extent):
    "Bytes a vector takes: float32, whatever the file has."
    return 2 * extent.nbytes if extent.dtype == "BF16" else page_padded(extent.nbytes)


def _front(streams, nbytes):
    "The names from the front of `streams` that fit into `nbytes`, then later ones that still do; and the bytes they take."
    taken, front = 0, []
    for name, e in streams.items():
        if taken + page_padded(e.nbytes) <= nbytes:
            front.append(name)
            taken += page_padded(e.nbytes)
    return frozenset(front), taken


def _enough(least):
    "Megabytes that will do: two processes of a kind differ by some tenths."
    return -(-(least + 500_000) // 10**6)


# %% [markdown]
# The last two columns of the table, computed with the released numbers and no checkpoint at all.

# %%
K3 = read_config(ROOT / "fixtures" / "k3")
width = K3.kda_num_heads * K3.kda_head_dim
matrices = 4 * len(K3.kda_layers) * width * K3.kda_head_dim
print("KDA state", shown_size(matrices), "+", shown_size(state_bytes(K3) - matrices), "of history")
print("latent cache", shown_size(position_bytes(K3)), "a position,", shown_size(4096 * position_bytes(K3)), "at 4,096")

# %% [markdown]
# The embedded model is so small that the interpreter dominates any plan. At its smallest budget nothing is pinned and
# rows arrive through the ring. Less is refused, with the number that would do.

# %% tags=["nbval-ignore-output"]
config, checkpoint = read_config(ORACLE / "model"), Checkpoint(ORACLE / "model")


def floor(context):
    "The smallest budget make_plan accepts now: it says so when it refuses less."
    try:
        make_plan(config, checkpoint, 1, context)
    except PlanError as error:
        return error.least


least = floor(context=32)
for extra in (0, 2_000_000, 50_000_000):
    plan = make_plan(config, checkpoint, least + 500_000 + extra, context=32)
    print(f"{extra / 1e6:3.0f} MB above the floor: {100 * plan.pinned_bytes / plan.trunk_bytes:3.0f}% of the trunk pinned, "
          f"{plan.slots} ring slots, {plan.expert_slots} expert slots")
    assert plan.total <= least + 500_000 + extra
