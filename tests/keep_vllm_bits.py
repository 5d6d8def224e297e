"""Imported by vLLM's workers: on a CPU they keep weights as they are, as on a GPU, so that bits can be compared."""

import vllm._custom_ops

vllm._custom_ops._supports_onednn = False  # which would pack them


class KeepBits:
    """What `worker_extension_cls` names; nothing in it is called."""
