"""A module that cannot be imported, in the place of what processes of the GPU benchmarks need."""

raise RuntimeError("this module raises")
