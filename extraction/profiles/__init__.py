"""Server settings that are known to work for one model on one kind of machine, as TOML files."""
