from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Nothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Version(_message.Message):
    __slots__ = ("version", "api_version")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    API_VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    api_version: int
    def __init__(self, version: _Optional[str] = ..., api_version: _Optional[int] = ...) -> None: ...

class StartedAt(_message.Message):
    __slots__ = ("started_at",)
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    started_at: int
    def __init__(self, started_at: _Optional[int] = ...) -> None: ...

class Subscription(_message.Message):
    __slots__ = ("interval",)
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    interval: int
    def __init__(self, interval: _Optional[int] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("memory", "goroutines", "uplink_total", "downlink_total")
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    GOROUTINES_FIELD_NUMBER: _ClassVar[int]
    UPLINK_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_TOTAL_FIELD_NUMBER: _ClassVar[int]
    memory: int
    goroutines: int
    uplink_total: int
    downlink_total: int
    def __init__(self, memory: _Optional[int] = ..., goroutines: _Optional[int] = ..., uplink_total: _Optional[int] = ..., downlink_total: _Optional[int] = ...) -> None: ...

class ConnectionEvents(_message.Message):
    __slots__ = ("events", "reset")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[ConnectionEvent]
    reset: bool
    def __init__(self, events: _Optional[_Iterable[_Union[ConnectionEvent, _Mapping]]] = ..., reset: bool = ...) -> None: ...

class ConnectionEvent(_message.Message):
    __slots__ = ("type", "id", "connection", "uplink_delta", "downlink_delta", "closed_at")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    UPLINK_DELTA_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_DELTA_FIELD_NUMBER: _ClassVar[int]
    CLOSED_AT_FIELD_NUMBER: _ClassVar[int]
    type: int
    id: str
    connection: Connection
    uplink_delta: int
    downlink_delta: int
    closed_at: int
    def __init__(self, type: _Optional[int] = ..., id: _Optional[str] = ..., connection: _Optional[_Union[Connection, _Mapping]] = ..., uplink_delta: _Optional[int] = ..., downlink_delta: _Optional[int] = ..., closed_at: _Optional[int] = ...) -> None: ...

class Connection(_message.Message):
    __slots__ = ("id", "inbound", "network", "source", "destination", "protocol", "user", "created_at", "closed_at", "uplink_total", "downlink_total", "outbound")
    ID_FIELD_NUMBER: _ClassVar[int]
    INBOUND_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_AT_FIELD_NUMBER: _ClassVar[int]
    UPLINK_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_TOTAL_FIELD_NUMBER: _ClassVar[int]
    OUTBOUND_FIELD_NUMBER: _ClassVar[int]
    id: str
    inbound: str
    network: str
    source: str
    destination: str
    protocol: str
    user: str
    created_at: int
    closed_at: int
    uplink_total: int
    downlink_total: int
    outbound: str
    def __init__(self, id: _Optional[str] = ..., inbound: _Optional[str] = ..., network: _Optional[str] = ..., source: _Optional[str] = ..., destination: _Optional[str] = ..., protocol: _Optional[str] = ..., user: _Optional[str] = ..., created_at: _Optional[int] = ..., closed_at: _Optional[int] = ..., uplink_total: _Optional[int] = ..., downlink_total: _Optional[int] = ..., outbound: _Optional[str] = ...) -> None: ...

class CloseConnectionRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("stat",)
    STAT_FIELD_NUMBER: _ClassVar[int]
    stat: Stat
    def __init__(self, stat: _Optional[_Union[Stat, _Mapping]] = ...) -> None: ...

class QueryStatsRequest(_message.Message):
    __slots__ = ("reset", "patterns")
    RESET_FIELD_NUMBER: _ClassVar[int]
    PATTERNS_FIELD_NUMBER: _ClassVar[int]
    reset: bool
    patterns: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reset: bool = ..., patterns: _Optional[_Iterable[str]] = ...) -> None: ...

class QueryStatsResponse(_message.Message):
    __slots__ = ("stat",)
    STAT_FIELD_NUMBER: _ClassVar[int]
    stat: _containers.RepeatedCompositeFieldContainer[Stat]
    def __init__(self, stat: _Optional[_Iterable[_Union[Stat, _Mapping]]] = ...) -> None: ...

class Stat(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("tag", "type", "selected", "items")
    TAG_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    SELECTED_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    tag: str
    type: str
    selected: str
    items: _containers.RepeatedCompositeFieldContainer[GroupItem]
    def __init__(self, tag: _Optional[str] = ..., type: _Optional[str] = ..., selected: _Optional[str] = ..., items: _Optional[_Iterable[_Union[GroupItem, _Mapping]]] = ...) -> None: ...

class GroupItem(_message.Message):
    __slots__ = ("tag", "url_test_time", "url_test_delay")
    TAG_FIELD_NUMBER: _ClassVar[int]
    URL_TEST_TIME_FIELD_NUMBER: _ClassVar[int]
    URL_TEST_DELAY_FIELD_NUMBER: _ClassVar[int]
    tag: str
    url_test_time: int
    url_test_delay: int
    def __init__(self, tag: _Optional[str] = ..., url_test_time: _Optional[int] = ..., url_test_delay: _Optional[int] = ...) -> None: ...

class Groups(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: _containers.RepeatedCompositeFieldContainer[Group]
    def __init__(self, group: _Optional[_Iterable[_Union[Group, _Mapping]]] = ...) -> None: ...

class SelectOutboundRequest(_message.Message):
    __slots__ = ("group_tag", "outbound_tag")
    GROUP_TAG_FIELD_NUMBER: _ClassVar[int]
    OUTBOUND_TAG_FIELD_NUMBER: _ClassVar[int]
    group_tag: str
    outbound_tag: str
    def __init__(self, group_tag: _Optional[str] = ..., outbound_tag: _Optional[str] = ...) -> None: ...
