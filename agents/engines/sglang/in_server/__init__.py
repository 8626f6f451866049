"""What runs inside the SGLang servers that we start: an image processor that keeps the images it has been sent.

SGLang imports this package where `SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE` names it, and takes the processor classes of
its modules in place of its own. `processor` and `handover` need SGLang, the other modules do not.
"""
