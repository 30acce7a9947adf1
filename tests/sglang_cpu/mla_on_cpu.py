"""An SGLang plugin for tests only: tells DeepSeek's latent attention which path to take on `torch_native`.

SGLang has no rule for that pair, since nobody serves such a model so. Copied by `rig.py` into a folder of its own with
an entry point; it must import nothing but SGLang.
"""


def register() -> None:
    """Send MLA through its absorbed path, which needs no kernel of a GPU."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    handler.AttentionBackendRegistry._handlers["torch_native"] = lambda _attention, _batch: AttnForwardMethod.MLA
