"""The rig that runs real SGLang without a GPU: see README.md."""
