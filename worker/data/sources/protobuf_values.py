"""Messages of Protobuf as values of events, by a set of descriptors that protoc has written."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from ....proto.config.stream_config import ProtobufConfig
from ....proto.errors import InvalidArgument
from ..storage import open_bytes

__all__ = ["ProtobufValues"]

_SETTING = "data.stream.kafka.protobuf"


class ProtobufValues:
    """Writes messages as lines of JSON, whose fields have their names in the schema.

    Numbers stay numbers, enums are their names, bytes are text of UTF-8. A field without presence has its default where
    it was not set, and one with presence is left out.

    Args:
        config: the descriptors, and the type of the messages.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it is no set of descriptors, lacks a file that another imports, or has no such message.
    """

    def __init__(self, config: ProtobufConfig) -> None:
        pool = descriptor_pool.DescriptorPool()
        with open_bytes(config.descriptors) as file:
            data = file.read()
        try:
            for each in descriptor_pb2.FileDescriptorSet.FromString(data).file:
                pool.Add(each)
            found = pool.FindMessageTypeByName(config.message)
        except KeyError:
            raise InvalidArgument(f"{_SETTING}.message: {config.descriptors} has no message {config.message}") from None
        except (DecodeError, TypeError) as error:
            raise InvalidArgument(
                f"{_SETTING}.descriptors: {config.descriptors} is no whole set of descriptors ({error}); make it with "
                "protoc --descriptor_set_out --include_imports"
            ) from error
        self._kind = message_factory.GetMessageClass(found)

    def line_of(self, value: bytes) -> bytes | None:
        """Returns a message as JSON; None: the bytes are none, or have text that is no UTF-8."""
        try:
            return json.dumps(_plain(self._kind.FromString(value))).encode()
        except (DecodeError, UnicodeDecodeError):
            return None


def _plain(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if field.is_repeated and field.message_type is not None and field.message_type.GetOptions().map_entry:
            found[field.name] = {
                str(key): _cell(field.message_type.fields_by_name["value"], value[key]) for key in value
            }
        elif field.is_repeated:
            found[field.name] = [_cell(field, each) for each in value]
        else:
            found[field.name] = _cell(field, value)
    return found


def _cell(field: FieldDescriptor, value: Any) -> Any:
    if field.type in (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_GROUP):
        return _plain(value)
    if field.type == FieldDescriptor.TYPE_ENUM:
        named = field.enum_type.values_by_number.get(value)
        return str(value) if named is None else named.name
    return value.decode() if field.type == FieldDescriptor.TYPE_BYTES else value
