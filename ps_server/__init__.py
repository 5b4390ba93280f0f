"""The training parameter server and the coordinator."""

from ..cpp_ext import _server
from ..proto.errors import error_of

_server.set_error_factory(error_of)
