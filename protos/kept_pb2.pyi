from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KeptLimits(_message.Message):
    __slots__ = ("word", "over", "since", "began", "before", "up", "down", "near", "reached", "expired", "off_since", "gone_since", "ahead", "zone", "cut_until", "slow_until", "slow_speed", "more_up", "more_down", "parts_up", "parts_down")
    WORD_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    NEAR_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    OFF_SINCE_FIELD_NUMBER: _ClassVar[int]
    GONE_SINCE_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    CUT_UNTIL_FIELD_NUMBER: _ClassVar[int]
    SLOW_UNTIL_FIELD_NUMBER: _ClassVar[int]
    SLOW_SPEED_FIELD_NUMBER: _ClassVar[int]
    MORE_UP_FIELD_NUMBER: _ClassVar[int]
    MORE_DOWN_FIELD_NUMBER: _ClassVar[int]
    PARTS_UP_FIELD_NUMBER: _ClassVar[int]
    PARTS_DOWN_FIELD_NUMBER: _ClassVar[int]
    word: bytes
    over: bytes
    since: int
    began: float
    before: int
    up: int
    down: int
    near: bool
    reached: bool
    expired: bool
    off_since: float
    gone_since: float
    ahead: float
    zone: str
    cut_until: float
    slow_until: float
    slow_speed: int
    more_up: int
    more_down: int
    parts_up: int
    parts_down: int
    def __init__(self, word: _Optional[bytes] = ..., over: _Optional[bytes] = ..., since: _Optional[int] = ..., began: _Optional[float] = ..., before: _Optional[int] = ..., up: _Optional[int] = ..., down: _Optional[int] = ..., near: bool = ..., reached: bool = ..., expired: bool = ..., off_since: _Optional[float] = ..., gone_since: _Optional[float] = ..., ahead: _Optional[float] = ..., zone: _Optional[str] = ..., cut_until: _Optional[float] = ..., slow_until: _Optional[float] = ..., slow_speed: _Optional[int] = ..., more_up: _Optional[int] = ..., more_down: _Optional[int] = ..., parts_up: _Optional[int] = ..., parts_down: _Optional[int] = ...) -> None: ...

class KeptBytes(_message.Message):
    __slots__ = ("received", "sent")
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    received: int
    sent: int
    def __init__(self, received: _Optional[int] = ..., sent: _Optional[int] = ...) -> None: ...

class KeptNode(_message.Message):
    __slots__ = ("began", "seen", "used", "near", "over", "boot", "last", "ahead", "zone")
    class LastEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: KeptBytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[KeptBytes, _Mapping]] = ...) -> None: ...
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    NEAR_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    began: float
    seen: float
    used: KeptBytes
    near: bool
    over: bool
    boot: str
    last: _containers.MessageMap[str, KeptBytes]
    ahead: float
    zone: str
    def __init__(self, began: _Optional[float] = ..., seen: _Optional[float] = ..., used: _Optional[_Union[KeptBytes, _Mapping]] = ..., near: bool = ..., over: bool = ..., boot: _Optional[str] = ..., last: _Optional[_Mapping[str, KeptBytes]] = ..., ahead: _Optional[float] = ..., zone: _Optional[str] = ...) -> None: ...

class KeptDay(_message.Message):
    __slots__ = ("users", "inbounds", "outbounds", "interfaces", "controllers", "transports")
    USERS_FIELD_NUMBER: _ClassVar[int]
    INBOUNDS_FIELD_NUMBER: _ClassVar[int]
    OUTBOUNDS_FIELD_NUMBER: _ClassVar[int]
    INTERFACES_FIELD_NUMBER: _ClassVar[int]
    CONTROLLERS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    users: KeptBytes
    inbounds: KeptBytes
    outbounds: KeptBytes
    interfaces: KeptBytes
    controllers: KeptBytes
    transports: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, users: _Optional[_Union[KeptBytes, _Mapping]] = ..., inbounds: _Optional[_Union[KeptBytes, _Mapping]] = ..., outbounds: _Optional[_Union[KeptBytes, _Mapping]] = ..., interfaces: _Optional[_Union[KeptBytes, _Mapping]] = ..., controllers: _Optional[_Union[KeptBytes, _Mapping]] = ..., transports: _Optional[_Iterable[str]] = ...) -> None: ...

class KeptReading(_message.Message):
    __slots__ = ("began", "boot", "uptime", "last")
    class LastEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: KeptBytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[KeptBytes, _Mapping]] = ...) -> None: ...
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    began: float
    boot: str
    uptime: float
    last: _containers.MessageMap[str, KeptBytes]
    def __init__(self, began: _Optional[float] = ..., boot: _Optional[str] = ..., uptime: _Optional[float] = ..., last: _Optional[_Mapping[str, KeptBytes]] = ...) -> None: ...
