"""Triton kernels of the draft tree: importing this puts them into the dispatch table for CUDA.

They have never run on a GPU yet: what is proven is that they compute the reference's result in Triton's interpreter
and that they compile to machine code for sm_80, sm_90 and sm_100. Like the reference they read no value on the host.
Integers and scores equal the reference's; log-probabilities are summed in another order (within about 2e-6).
"""

from sgl_kernel_ext.dispatch import register
from sgl_kernel_ext.triton_kernels.candidates import draft_candidates
from sgl_kernel_ext.triton_kernels.kv import compact_kv
from sgl_kernel_ext.triton_kernels.rows import fill_rows, layout_rows, matching_child
from sgl_kernel_ext.triton_kernels.trees import build_tree, path_product

for _kernel in (draft_candidates, build_tree, path_product, fill_rows, layout_rows, matching_child, compact_kv):
    register(_kernel.__name__, "triton", _kernel)
