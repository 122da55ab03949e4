"""What checks the project and is no part of it."""
