"""transformers' configuration classes, without much of transformers and torch that they import.

The classes check `hidden_act` against a table of activations if there is one. To import that table
takes 2.5 s, since it brings torch's compiler and its distributed tensors. `config.py` checks the
field itself, so an empty table stands in during the import.
"""

import sys
from types import ModuleType

_TABLE = "transformers.activations"

if _TABLE not in sys.modules:
    sys.modules[_TABLE] = stub = ModuleType(_TABLE)
    stub.ACT2FN = {}  # type: ignore[attr-defined]
    try:
        import transformers.utils.type_validators  # noqa: F401
    except ImportError:
        pass  # another version of transformers, which needs more of the table
    finally:
        del sys.modules[_TABLE]

from transformers import CONFIG_MAPPING, PreTrainedConfig  # noqa: E402

__all__ = ["CONFIG_MAPPING", "PreTrainedConfig"]
