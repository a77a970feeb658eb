"""Reads the settings of a gateway again while it serves, on SIGHUP."""

import logging
from collections.abc import Sequence

from starlette.datastructures import State

from penstock.gateway.http.settings import RELOADABLE, GatewaySettings
from penstock.schemas.process.start import WrongSettings, read_settings, write_log_to_stderr
from penstock.schemas.secret import BadSecret

log = logging.getLogger(__name__)


def reload(state: State, argv: Sequence[str]) -> None:
    """Read the settings as at the start, and put those that are RELOADABLE in force.

    Where one is wrong all stay as they were, and the log says why. Settings are logged by their
    names alone, since values may be secret.
    """
    old: GatewaySettings = state.gateway.settings
    try:
        read = read_settings(GatewaySettings, "penstock gateway", argv, old.redis_url)
        names = sorted(GatewaySettings.model_fields)
        changed = [name for name in names if getattr(read, name) != getattr(old, name)]
        taken = {name: getattr(read, name) for name in changed if name in RELOADABLE}
        new = old.model_copy(update=taken)
        state.apply(new)
    except (WrongSettings, BadSecret) as wrong:
        for sentence in wrong.args:
            log.error("settings stay as they were: %s", sentence)
        return
    write_log_to_stderr("gateway", new)
    for name in changed:
        if name in RELOADABLE:
            log.info("%s was changed", name)
        else:
            log.warning("%s needs a restart and was not changed", name)
    log.info("settings were read again")
