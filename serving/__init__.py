"""The serving parameter server: published versions of models, live sync with training, lookups, and its client."""

from ..cpp_ext import _client, _server
from ..proto.errors import error_of

_server.set_error_factory(error_of)
_client.set_error_factory(error_of)
