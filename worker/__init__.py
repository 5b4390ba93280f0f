"""The trainer's side: the session, the rewrite of a model, and what feeds them."""

from ..cpp_ext import _client
from ..proto.errors import error_of

_client.set_error_factory(error_of)
