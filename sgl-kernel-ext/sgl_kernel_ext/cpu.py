"""CPU kernels: importing this module puts them into the dispatch table."""

from sgl_kernel_ext.dispatch import register
from sgl_kernel_ext.reference import attention as reference

register("paged_attention", "reference", reference.paged_attention)
