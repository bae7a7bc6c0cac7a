"""Reading and validation of recipes, and construction of the objects of a run from them."""
