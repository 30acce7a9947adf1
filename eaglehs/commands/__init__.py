"""One command a file: a signature, one check of flag combinations, one call, one result."""
