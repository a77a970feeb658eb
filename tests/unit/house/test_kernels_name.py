"""Our package `kernels` must not pass for the Hugging Face one of that name.

transformers reads the version of whatever distribution provides `kernels`, and at some versions it
takes the package for its own and dies on import.
"""

from transformers.utils import is_kernels_available

import penstock.kernels


def test_transformers_does_not_take_our_kernels_for_its_own() -> None:
    assert not is_kernels_available()
    assert not hasattr(penstock.kernels, "__version__")
