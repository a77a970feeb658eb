"""Stores of objects: S3 and what speaks as it, Google's and Microsoft's, by the package obstore.

Credentials and the endpoint come from the environment, under each store's usual names.
"""

import atexit
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore

OBJECT_URL = r"^(s3|gs|az)://[^/?#@]+(/[^?#]*)?$"
RETRY_S = 15  # how long a store that does not answer is asked again, or waited for
NOT_THERE = "status code: 404"
_CONNECT_S = 5
_MOST_S = 3600  # how long a request may take while its bytes come
# A thread of obstore lets go of objects of Python after it answered. Where Python ends then, that
# aborts the process, whose exit status is then none of ours.
_LAST_TOUCH_S = 0.05
# What the environment says of how a store is reached; options of our own stand in place of it all.
_OF_CLIENT = ("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_ca_certificate")
_YES = ("1", "true", "on", "yes")
_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}


def open_store(url: str) -> "ObjectStore":
    """Return the store of the objects below a URL, which is not asked for anything yet.

    Raises an error of obstore for a URL that means nothing, ImportError without that package.
    """
    from obstore.store import from_url

    atexit.register(time.sleep, _LAST_TOUCH_S)
    retries = timedelta(seconds=RETRY_S)
    return from_url(
        url,
        retry_config={"max_retries": 4, "retry_timeout": retries},
        client_options=_client_options(url),
    )


def _client_options(url: str) -> "ClientConfig":
    head = _PREFIXES[url.partition(":")[0]]
    variables = {name: os.environ.get(f"{head}{name.upper()}") for name in _OF_CLIENT}
    options: ClientConfig = {
        "read_timeout": timedelta(seconds=RETRY_S),
        "connect_timeout": timedelta(seconds=_CONNECT_S),
        "timeout": timedelta(seconds=_MOST_S),
    }
    if proxy := variables["proxy_url"]:
        options["proxy_url"] = proxy
    if certificate := variables["proxy_ca_certificate"]:
        options["proxy_ca_certificate"] = certificate
    options["allow_http"] = (variables["allow_http"] or "").lower() in _YES
    options["allow_invalid_certificates"] = (
        variables["allow_invalid_certificates"] or ""
    ).lower() in _YES
    return options
