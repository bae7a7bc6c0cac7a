"""Commands other than the run of a recipe. `hf-posttrain NAME ...` calls `main` of a module here."""
