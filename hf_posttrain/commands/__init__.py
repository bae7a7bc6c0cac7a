"""Commands besides the run of a recipe: `hf-posttrain NAME ...` is the `main` of the module NAME here."""
