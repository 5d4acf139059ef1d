"""The 17 schedule generators, one file each, and the table that names them."""
