"""Prompts to dumps: the SGLang plugin, the server's life, the client, the engines."""
