"""The messages of ``indexer.v1`` by the real protobuf package, as ``simm/index/rpc/protobuf.py`` describes them."""

from __future__ import annotations

from typing import Any, Final

#: Message -> fields: number, name, type, is a list.
FIELDS: Final = {
    "GetPodScoresRequest": [
        (1, "prompt", "string", False), (2, "model_name", "string", False), (3, "pod_identifiers", "string", True),
        (1000, "token_ids", "uint32", True), (1001, "block_size", "uint32", False),
        (1002, "lora_name", "string", False),
        (1003, "tenant_id", "string", False), (1004, "cache_salt", "string", False),
        (2000, "of_a_later_version", "string", False), (2001, "also_new", "double", True),
    ],
    "PodScore": [(1, "pod", "string", False), (2, "score", "double", False), (3, "data_parallel_rank", "int32", False)],
    "GetPodScoresResponse": [(1, "scores", "PodScore", True)],
}  # fmt: skip


def messages(packed: bool = True) -> tuple[Any, Any]:
    """Return the classes of the request and of the response. ``packed``: how lists of numbers are sent."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="indexer.proto", package="indexer.v1", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for number, field, kind, several in fields:
            added = message.field.add(name=field, number=number)
            added.label = kinds.LABEL_REPEATED if several else kinds.LABEL_OPTIONAL
            if kind in FIELDS:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".indexer.v1.{kind}"
            else:
                added.type = getattr(kinds, f"TYPE_{kind.upper()}")
            if several and kind == "uint32":
                added.options.packed = packed
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    request, response = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"indexer.v1.{each}"))
        for each in ("GetPodScoresRequest", "GetPodScoresResponse")
    )
    return request, response
