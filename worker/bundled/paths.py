"""The folders of the bundled demonstration model and its draft, and texts to calibrate with."""

from pathlib import Path

BUNDLED_MODEL = Path(__file__).parent / "penstock-5m"
BUNDLED_DRAFT = Path(__file__).parent / "penstock-1m-draft"
CALIBRATION_TEXTS = Path(__file__).parent / "calibration.jsonl"
