"""The tables: their migrations, and which version of them this package works with."""
