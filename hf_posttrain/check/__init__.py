"""What a recipe would do, said before it is done."""
