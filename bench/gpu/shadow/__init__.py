"""A plugin that captures synchronously, to hold the product against."""
