from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Handover(_message.Message):
    __slots__ = ("format", "version", "ring", "run", "draining", "exact", "common")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    COMMON_FIELD_NUMBER: _ClassVar[int]
    format: int
    version: str
    ring: Ring
    run: Run
    draining: _containers.RepeatedCompositeFieldContainer[Run]
    exact: bool
    common: bytes
    def __init__(self, format: _Optional[int] = ..., version: _Optional[str] = ..., ring: _Optional[_Union[Ring, _Mapping]] = ..., run: _Optional[_Union[Run, _Mapping]] = ..., draining: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., exact: bool = ..., common: _Optional[bytes] = ...) -> None: ...

class Ring(_message.Message):
    __slots__ = ("name", "next", "lines")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    name: str
    next: int
    lines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., next: _Optional[int] = ..., lines: _Optional[_Iterable[str]] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("type", "pid", "core", "counters", "since", "backend", "routing", "way_back", "mark", "config", "saved")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TYPE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CORE_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    WAY_BACK_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    type: int
    pid: int
    core: bytes
    counters: _containers.ScalarMap[str, int]
    since: float
    backend: bytes
    routing: bytes
    way_back: float
    mark: str
    config: str
    saved: bool
    def __init__(self, type: _Optional[int] = ..., pid: _Optional[int] = ..., core: _Optional[bytes] = ..., counters: _Optional[_Mapping[str, int]] = ..., since: _Optional[float] = ..., backend: _Optional[bytes] = ..., routing: _Optional[bytes] = ..., way_back: _Optional[float] = ..., mark: _Optional[str] = ..., config: _Optional[str] = ..., saved: bool = ...) -> None: ...

class Common(_message.Message):
    __slots__ = ("installed", "answers")
    INSTALLED_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    installed: _containers.RepeatedCompositeFieldContainer[Installed]
    answers: _containers.RepeatedCompositeFieldContainer[Answer]
    def __init__(self, installed: _Optional[_Iterable[_Union[Installed, _Mapping]]] = ..., answers: _Optional[_Iterable[_Union[Answer, _Mapping]]] = ...) -> None: ...

class Installed(_message.Message):
    __slots__ = ("path", "configured", "setpriv", "changed", "version", "number", "lines", "chosen")
    PATH_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    SETPRIV_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    path: str
    configured: str
    setpriv: str
    changed: int
    version: str
    number: _containers.RepeatedScalarFieldContainer[int]
    lines: _containers.RepeatedScalarFieldContainer[str]
    chosen: str
    def __init__(self, path: _Optional[str] = ..., configured: _Optional[str] = ..., setpriv: _Optional[str] = ..., changed: _Optional[int] = ..., version: _Optional[str] = ..., number: _Optional[_Iterable[int]] = ..., lines: _Optional[_Iterable[str]] = ..., chosen: _Optional[str] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("asked", "output")
    ASKED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    asked: bytes
    output: bytes
    def __init__(self, asked: _Optional[bytes] = ..., output: _Optional[bytes] = ...) -> None: ...

class Sharing(_message.Message):
    __slots__ = ("members", "led", "closed", "streams", "datagrams", "sessions", "reaches")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    DATAGRAMS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    REACHES_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedScalarFieldContainer[int]
    led: int
    closed: _containers.RepeatedScalarFieldContainer[int]
    streams: _containers.RepeatedCompositeFieldContainer[Group]
    datagrams: _containers.RepeatedCompositeFieldContainer[Group]
    sessions: _containers.RepeatedCompositeFieldContainer[Spot]
    reaches: _containers.RepeatedCompositeFieldContainer[Reach]
    def __init__(self, members: _Optional[_Iterable[int]] = ..., led: _Optional[int] = ..., closed: _Optional[_Iterable[int]] = ..., streams: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., datagrams: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[Spot, _Mapping]]] = ..., reaches: _Optional[_Iterable[_Union[Reach, _Mapping]]] = ...) -> None: ...

class Address(_message.Message):
    __slots__ = ("family", "host", "port", "only", "interface")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    ONLY_FIELD_NUMBER: _ClassVar[int]
    INTERFACE_FIELD_NUMBER: _ClassVar[int]
    family: int
    host: str
    port: int
    only: bool
    interface: int
    def __init__(self, family: _Optional[int] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., only: bool = ..., interface: _Optional[int] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("address", "members", "current")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    address: Address
    members: _containers.RepeatedCompositeFieldContainer[Member]
    current: int
    def __init__(self, address: _Optional[_Union[Address, _Mapping]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., current: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("pid", "number", "order", "ended")
    PID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    pid: int
    number: int
    order: int
    ended: bool
    def __init__(self, pid: _Optional[int] = ..., number: _Optional[int] = ..., order: _Optional[int] = ..., ended: bool = ...) -> None: ...

class Spot(_message.Message):
    __slots__ = ("address", "current", "others")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    address: Address
    current: int
    others: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, address: _Optional[_Union[Address, _Mapping]] = ..., current: _Optional[int] = ..., others: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class Reach(_message.Message):
    __slots__ = ("pid", "first", "end")
    PID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    pid: int
    first: _containers.RepeatedScalarFieldContainer[int]
    end: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pid: _Optional[int] = ..., first: _Optional[_Iterable[int]] = ..., end: _Optional[_Iterable[int]] = ...) -> None: ...

class Process(_message.Message):
    __slots__ = ("pid", "outputs", "lines", "panic", "starved", "allowance")
    PID_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    PANIC_FIELD_NUMBER: _ClassVar[int]
    STARVED_FIELD_NUMBER: _ClassVar[int]
    ALLOWANCE_FIELD_NUMBER: _ClassVar[int]
    pid: int
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    lines: _containers.RepeatedScalarFieldContainer[str]
    panic: _containers.RepeatedScalarFieldContainer[str]
    starved: bool
    allowance: str
    def __init__(self, pid: _Optional[int] = ..., outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., lines: _Optional[_Iterable[str]] = ..., panic: _Optional[_Iterable[str]] = ..., starved: bool = ..., allowance: _Optional[str] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("number", "tail", "cutting")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    CUTTING_FIELD_NUMBER: _ClassVar[int]
    number: int
    tail: bytes
    cutting: bool
    def __init__(self, number: _Optional[int] = ..., tail: _Optional[bytes] = ..., cutting: bool = ...) -> None: ...

class Accounts(_message.Message):
    __slots__ = ("by_key",)
    class ByKeyEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    BY_KEY_FIELD_NUMBER: _ClassVar[int]
    by_key: _containers.ScalarMap[str, bytes]
    def __init__(self, by_key: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class File(_message.Message):
    __slots__ = ("path", "mark", "pinned")
    PATH_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    path: str
    mark: _containers.RepeatedScalarFieldContainer[int]
    pinned: bool
    def __init__(self, path: _Optional[str] = ..., mark: _Optional[_Iterable[int]] = ..., pinned: bool = ...) -> None: ...

class XrayRun(_message.Message):
    __slots__ = ("process", "socket", "token", "direct", "accounts", "files", "places", "cut", "suspects", "nesting", "hidden", "aliased")
    class AccountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Accounts
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Accounts, _Mapping]] = ...) -> None: ...
    class PlacesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Places
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Places, _Mapping]] = ...) -> None: ...
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    SUSPECTS_FIELD_NUMBER: _ClassVar[int]
    NESTING_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    ALIASED_FIELD_NUMBER: _ClassVar[int]
    process: Process
    socket: str
    token: str
    direct: bool
    accounts: _containers.MessageMap[str, Accounts]
    files: _containers.RepeatedCompositeFieldContainer[File]
    places: _containers.MessageMap[str, Places]
    cut: int
    suspects: Suspects
    nesting: _containers.RepeatedScalarFieldContainer[bytes]
    hidden: _containers.RepeatedScalarFieldContainer[str]
    aliased: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., socket: _Optional[str] = ..., token: _Optional[str] = ..., direct: bool = ..., accounts: _Optional[_Mapping[str, Accounts]] = ..., files: _Optional[_Iterable[_Union[File, _Mapping]]] = ..., places: _Optional[_Mapping[str, Places]] = ..., cut: _Optional[int] = ..., suspects: _Optional[_Union[Suspects, _Mapping]] = ..., nesting: _Optional[_Iterable[bytes]] = ..., hidden: _Optional[_Iterable[str]] = ..., aliased: _Optional[_Iterable[str]] = ...) -> None: ...

class Suspects(_message.Message):
    __slots__ = ("look", "users", "where", "since")
    LOOK_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    look: int
    users: _containers.RepeatedCompositeFieldContainer[Suspect]
    where: _containers.RepeatedScalarFieldContainer[bytes]
    since: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, look: _Optional[int] = ..., users: _Optional[_Iterable[_Union[Suspect, _Mapping]]] = ..., where: _Optional[_Iterable[bytes]] = ..., since: _Optional[_Iterable[int]] = ...) -> None: ...

class Suspect(_message.Message):
    __slots__ = ("tag", "key", "seconds", "look")
    TAG_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOOK_FIELD_NUMBER: _ClassVar[int]
    tag: str
    key: str
    seconds: float
    look: int
    def __init__(self, tag: _Optional[str] = ..., key: _Optional[str] = ..., seconds: _Optional[float] = ..., look: _Optional[int] = ...) -> None: ...

class Places(_message.Message):
    __slots__ = ("where", "key", "socket")
    WHERE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    where: _containers.RepeatedScalarFieldContainer[bytes]
    key: _containers.RepeatedScalarFieldContainer[str]
    socket: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, where: _Optional[_Iterable[bytes]] = ..., key: _Optional[_Iterable[str]] = ..., socket: _Optional[_Iterable[int]] = ...) -> None: ...

class SingBoxRun(_message.Message):
    __slots__ = ("process", "port", "secret", "stats_port", "users_port", "accounts", "configured", "files", "untold", "labels", "barred", "lingering", "lacking", "cut", "nobody", "tally", "aliased")
    class AccountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Accounts
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Accounts, _Mapping]] = ...) -> None: ...
    class ConfiguredEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Accounts
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Accounts, _Mapping]] = ...) -> None: ...
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    STATS_PORT_FIELD_NUMBER: _ClassVar[int]
    USERS_PORT_FIELD_NUMBER: _ClassVar[int]
    ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    UNTOLD_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    BARRED_FIELD_NUMBER: _ClassVar[int]
    LINGERING_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    NOBODY_FIELD_NUMBER: _ClassVar[int]
    TALLY_FIELD_NUMBER: _ClassVar[int]
    ALIASED_FIELD_NUMBER: _ClassVar[int]
    process: Process
    port: int
    secret: str
    stats_port: int
    users_port: int
    accounts: _containers.MessageMap[str, Accounts]
    configured: _containers.MessageMap[str, Accounts]
    files: _containers.RepeatedCompositeFieldContainer[File]
    untold: _containers.RepeatedScalarFieldContainer[str]
    labels: _containers.RepeatedCompositeFieldContainer[Label]
    barred: _containers.RepeatedCompositeFieldContainer[Label]
    lingering: bool
    lacking: int
    cut: int
    nobody: str
    tally: Tally
    aliased: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., port: _Optional[int] = ..., secret: _Optional[str] = ..., stats_port: _Optional[int] = ..., users_port: _Optional[int] = ..., accounts: _Optional[_Mapping[str, Accounts]] = ..., configured: _Optional[_Mapping[str, Accounts]] = ..., files: _Optional[_Iterable[_Union[File, _Mapping]]] = ..., untold: _Optional[_Iterable[str]] = ..., labels: _Optional[_Iterable[_Union[Label, _Mapping]]] = ..., barred: _Optional[_Iterable[_Union[Label, _Mapping]]] = ..., lingering: bool = ..., lacking: _Optional[int] = ..., cut: _Optional[int] = ..., nobody: _Optional[str] = ..., tally: _Optional[_Union[Tally, _Mapping]] = ..., aliased: _Optional[_Iterable[str]] = ...) -> None: ...

class Label(_message.Message):
    __slots__ = ("tag", "key", "name")
    TAG_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    tag: str
    key: str
    name: str
    def __init__(self, tag: _Optional[str] = ..., key: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class Tally(_message.Message):
    __slots__ = ("counters", "carried", "ended", "open", "closed")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    counters: _containers.ScalarMap[str, int]
    carried: int
    ended: int
    open: _containers.RepeatedCompositeFieldContainer[Counted]
    closed: _containers.RepeatedCompositeFieldContainer[Counted]
    def __init__(self, counters: _Optional[_Mapping[str, int]] = ..., carried: _Optional[int] = ..., ended: _Optional[int] = ..., open: _Optional[_Iterable[_Union[Counted, _Mapping]]] = ..., closed: _Optional[_Iterable[_Union[Counted, _Mapping]]] = ...) -> None: ...

class Counted(_message.Message):
    __slots__ = ("id", "up", "down", "scopes", "names")
    ID_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    SCOPES_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    id: str
    up: int
    down: int
    scopes: _containers.RepeatedScalarFieldContainer[str]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., up: _Optional[int] = ..., down: _Optional[int] = ..., scopes: _Optional[_Iterable[str]] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...
