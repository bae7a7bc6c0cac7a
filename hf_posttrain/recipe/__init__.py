"""A recipe file -> checked sections -> the objects of a run."""
