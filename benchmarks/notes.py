"""Why a bar is missed, and what happened since the records were made: words alone, as figures belong to the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_RAW = "h200/raw"
_LAB = "../../docs/lab"

# a note and the bars that it explains, as "operator pass, words"; the page shows it where one of them is missed
NOTES: Mapping[str, Sequence[str]] = {
    f"A copy of a tensor of this size is slower than the 2 GiB copy too; [norm]({_LAB}/norm.md) has both.": (
        "layer_norm forward, 4096 to 16384 wide",
        "layer_norm forward, 128 to 1024 wide",
    ),
    "Three other measurements and, at first, the sanitizer ran on the same host, and short backward passes wait for "
    f"it: [kernels alone, in turns]({_RAW}/norm_policies.txt). In a [second run]({_RAW}/norm_backward_again.json) "
    "without the sanitizer 4096 columns meet their bar, 1024 columns meet it for `rms_norm`, not for `layer_norm`.": (
        "layer_norm backward, 4096 to 8192 wide bfloat16",
        "layer_norm backward, 128 to 1024 wide bfloat16",
        "layer_norm backward, host time, forward + backward",
    ),
    "The fused call moves four tensors, addition and norm move five: 1.25× is what the bytes allow.": (
        "rms_norm forward, residual, against add then norm",
    ),
    f"The bench flushes the L2 before a call. In a CUDA graph these cells [meet the bar]({_LAB}/weighted_sum.md).": (
        "weighted_sum forward, from 512 wide",
        "weighted_sum forward, 64 wide",
    ),
    f"At 131072×320 the host takes longer than the [kernels]({_RAW}/weighted_sum_graph.txt).": (
        "weighted_sum backward, fastest rival",
    ),
    f"Bound by the host. Met in [another run]({_RAW}/soft_topk_first_run.md), which missed others.": (
        "coor_descent backward, 1024×8192 T=50 eps=0.1, the public Triton kernel",
        "coor_descent backward, 4096×1024 T=20 eps=4→0.03, the public Triton kernel",
        "soft_topk backward, 8192×8192",
    ),
    f"Bound by the host. Missed in [another run]({_RAW}/soft_topk_first_run.md) too.": (
        "coor_descent backward, torch.compile",
    ),
    "`topk` also makes gates and settles ties by the lowest index. These are cells of earlier kernels; [the present "
    "ones](../../docs/performance.md#topk) were measured on their own.": (
        "topk forward, torch.topk, which makes no gates",
    ),
    "Bound by the host: the kernel is a small part of the step. "
    f"[Alone and in turns]({_RAW}/lion_small_tensors.txt) the step is faster and still above the bar.": (
        "lion step, 1000 small tensors",
        "lion step, 1000 small tensors, fused AdamW",
    ),
    "Triton compiles a kernel once for a machine. With the kernel on disk the first step meets the bar.": (
        "lion first step, llama-1b, no compiled kernels on disk",
    ),
    "Eager calls of this size are bound by the host.": (
        "routed_feed_forward forward+backward, d=1024, 2×8192, dense",
        "routed_feed_forward forward+backward, d=512, 2×8192, dense",
        "routed_block forward+backward, d=1024, 2×8192, dense flash",
    ),
    "The peak holds cuBLAS workspaces, which the block measured first is charged with; see "
    f"[span_attention]({_LAB}/span_attention.md).": (
        "routed_block forward+backward, d=1024, 2×32768, memory of dense",
    ),
    "16-bit `layer_norm`: torch adds the weight's gradient up in 16 bits, onepass in 32.": (
        "layer_norm forward + backward, F's time + 5 % + 5 µs",
    ),
    "Small inputs miss it, and every backward pass of `coor_descent`.": (
        "coor_descent forward, 50 eager steps",
        "coor_descent backward, 50 eager steps",
    ),
    "Without `fused=True` no compiler is used, and an update passes over memory several times.": (
        "lion step, fastest rival",
    ),
}

SINCE = f"""\
## Since these runs
Later changes were timed in turns against revision 18994a1 on one H200:
- `soft_topk` counts saturated entries: `clamp` takes longer, meets its bar ([record]({_RAW}/ab_soft_topk_tails.txt)).
- Forward bits depend on a row alone: norms and `weighted_sum` stay within 2 % ([record]({_RAW}/ab_row_bits.txt)).
- Replay saves host time ([record]({_RAW}/replay.json)). Changed and not timed again: `weighted_sum` and \
norms on a CPU, the router's score kernel, norms forward above 16384 columns (an \
[H100](h100/less/norm_wide.json) has them: 0.83 to 1.45 times the time).

Elsewhere: [Lion and AdamW in training]({_RAW}/lion_training.md), [a causal block]({_RAW}/causal_block.txt), \
[routing that learns](../../docs/evidence.md).
"""
