"""The worker's log: one line an event, in the past tense, with ids and sizes and never a text."""

import logging

log = logging.getLogger("penstock.worker")
