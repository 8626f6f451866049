"""What runs inside the schedulers of SGLang's servers, which import it before they load a model.

SGLang imports the modules of the package that `SGLANG_EXTERNAL_MODEL_PACKAGE` names.
"""
