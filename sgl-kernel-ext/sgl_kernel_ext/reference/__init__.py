"""Plain-torch specifications of the kernels."""
