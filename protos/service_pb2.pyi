from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BackendType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    XRAY: _ClassVar[BackendType]
    WIREGUARD: _ClassVar[BackendType]
    SING_BOX: _ClassVar[BackendType]

class StatType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    Outbounds: _ClassVar[StatType]
    Outbound: _ClassVar[StatType]
    Inbounds: _ClassVar[StatType]
    Inbound: _ClassVar[StatType]
    UsersStat: _ClassVar[StatType]
    UserStat: _ClassVar[StatType]

class LimitAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CUT: _ClassVar[LimitAction]
    TELL: _ClassVar[LimitAction]
XRAY: BackendType
WIREGUARD: BackendType
SING_BOX: BackendType
Outbounds: StatType
Outbound: StatType
Inbounds: StatType
Inbound: StatType
UsersStat: StatType
UserStat: StatType
CUT: LimitAction
TELL: LimitAction

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BaseInfoResponse(_message.Message):
    __slots__ = ("running", "core_version", "version", "core_type", "state", "reason", "warnings", "limits", "traffic_interval", "notes")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    CORE_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CORE_TYPE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    running: bool
    core_version: str
    version: str
    core_type: str
    state: str
    reason: str
    warnings: _containers.RepeatedScalarFieldContainer[str]
    limits: LimitsSummary
    traffic_interval: float
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, running: bool = ..., core_version: _Optional[str] = ..., version: _Optional[str] = ..., core_type: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., warnings: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[LimitsSummary, _Mapping]] = ..., traffic_interval: _Optional[float] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class Backend(_message.Message):
    __slots__ = ("type", "config", "users", "keep_alive", "exclude_inbounds")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    KEEP_ALIVE_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_INBOUNDS_FIELD_NUMBER: _ClassVar[int]
    type: BackendType
    config: str
    users: _containers.RepeatedCompositeFieldContainer[User]
    keep_alive: int
    exclude_inbounds: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, type: _Optional[_Union[BackendType, str]] = ..., config: _Optional[str] = ..., users: _Optional[_Iterable[_Union[User, _Mapping]]] = ..., keep_alive: _Optional[int] = ..., exclude_inbounds: _Optional[_Iterable[str]] = ...) -> None: ...

class Log(_message.Message):
    __slots__ = ("detail", "id")
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    detail: str
    id: str
    def __init__(self, detail: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class Stat(_message.Message):
    __slots__ = ("name", "type", "link", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: str
    link: str
    value: int
    def __init__(self, name: _Optional[str] = ..., type: _Optional[str] = ..., link: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class StatResponse(_message.Message):
    __slots__ = ("stats",)
    STATS_FIELD_NUMBER: _ClassVar[int]
    stats: _containers.RepeatedCompositeFieldContainer[Stat]
    def __init__(self, stats: _Optional[_Iterable[_Union[Stat, _Mapping]]] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ("name", "reset", "type")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    reset: bool
    type: StatType
    def __init__(self, name: _Optional[str] = ..., reset: bool = ..., type: _Optional[_Union[StatType, str]] = ...) -> None: ...

class OnlineStatResponse(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class StatsOnlineIpListResponse(_message.Message):
    __slots__ = ("name", "ips", "forwarded")
    class IpsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    IPS_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_FIELD_NUMBER: _ClassVar[int]
    name: str
    ips: _containers.ScalarMap[str, int]
    forwarded: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., ips: _Optional[_Mapping[str, int]] = ..., forwarded: _Optional[_Iterable[str]] = ...) -> None: ...

class Latency(_message.Message):
    __slots__ = ("name", "alive", "delay", "link", "last_seen_time", "last_try_time", "source")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    DELAY_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_TIME_FIELD_NUMBER: _ClassVar[int]
    LAST_TRY_TIME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    alive: bool
    delay: int
    link: str
    last_seen_time: int
    last_try_time: int
    source: str
    def __init__(self, name: _Optional[str] = ..., alive: bool = ..., delay: _Optional[int] = ..., link: _Optional[str] = ..., last_seen_time: _Optional[int] = ..., last_try_time: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...

class LatencyRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class LatencyResponse(_message.Message):
    __slots__ = ("latencies",)
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    latencies: _containers.RepeatedCompositeFieldContainer[Latency]
    def __init__(self, latencies: _Optional[_Iterable[_Union[Latency, _Mapping]]] = ...) -> None: ...

class BillRequest(_message.Message):
    __slots__ = ("since",)
    SINCE_FIELD_NUMBER: _ClassVar[int]
    since: str
    def __init__(self, since: _Optional[str] = ...) -> None: ...

class BilledBytes(_message.Message):
    __slots__ = ("received", "sent")
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    received: int
    sent: int
    def __init__(self, received: _Optional[int] = ..., sent: _Optional[int] = ...) -> None: ...

class Bill(_message.Message):
    __slots__ = ("since", "until", "timezone", "users", "inbounds", "outbounds", "interfaces", "names", "controllers", "core", "headers", "others", "missing", "ratio", "least", "most", "transports", "warnings")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    TIMEZONE_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    INBOUNDS_FIELD_NUMBER: _ClassVar[int]
    OUTBOUNDS_FIELD_NUMBER: _ClassVar[int]
    INTERFACES_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    CONTROLLERS_FIELD_NUMBER: _ClassVar[int]
    CORE_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    since: int
    until: int
    timezone: str
    users: BilledBytes
    inbounds: BilledBytes
    outbounds: BilledBytes
    interfaces: BilledBytes
    names: _containers.RepeatedScalarFieldContainer[str]
    controllers: BilledBytes
    core: int
    headers: int
    others: int
    missing: int
    ratio: float
    least: float
    most: float
    transports: _containers.RepeatedScalarFieldContainer[str]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, since: _Optional[int] = ..., until: _Optional[int] = ..., timezone: _Optional[str] = ..., users: _Optional[_Union[BilledBytes, _Mapping]] = ..., inbounds: _Optional[_Union[BilledBytes, _Mapping]] = ..., outbounds: _Optional[_Union[BilledBytes, _Mapping]] = ..., interfaces: _Optional[_Union[BilledBytes, _Mapping]] = ..., names: _Optional[_Iterable[str]] = ..., controllers: _Optional[_Union[BilledBytes, _Mapping]] = ..., core: _Optional[int] = ..., headers: _Optional[int] = ..., others: _Optional[int] = ..., missing: _Optional[int] = ..., ratio: _Optional[float] = ..., least: _Optional[float] = ..., most: _Optional[float] = ..., transports: _Optional[_Iterable[str]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class BackendStatsResponse(_message.Message):
    __slots__ = ("num_goroutine", "num_gc", "alloc", "total_alloc", "sys", "mallocs", "frees", "live_objects", "pause_total_ns", "uptime")
    NUM_GOROUTINE_FIELD_NUMBER: _ClassVar[int]
    NUM_GC_FIELD_NUMBER: _ClassVar[int]
    ALLOC_FIELD_NUMBER: _ClassVar[int]
    TOTAL_ALLOC_FIELD_NUMBER: _ClassVar[int]
    SYS_FIELD_NUMBER: _ClassVar[int]
    MALLOCS_FIELD_NUMBER: _ClassVar[int]
    FREES_FIELD_NUMBER: _ClassVar[int]
    LIVE_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    num_goroutine: int
    num_gc: int
    alloc: int
    total_alloc: int
    sys: int
    mallocs: int
    frees: int
    live_objects: int
    pause_total_ns: int
    uptime: int
    def __init__(self, num_goroutine: _Optional[int] = ..., num_gc: _Optional[int] = ..., alloc: _Optional[int] = ..., total_alloc: _Optional[int] = ..., sys: _Optional[int] = ..., mallocs: _Optional[int] = ..., frees: _Optional[int] = ..., live_objects: _Optional[int] = ..., pause_total_ns: _Optional[int] = ..., uptime: _Optional[int] = ...) -> None: ...

class SystemStatsResponse(_message.Message):
    __slots__ = ("mem_total", "mem_used", "cpu_cores", "cpu_usage", "incoming_bandwidth_speed", "outgoing_bandwidth_speed", "uptime")
    MEM_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MEM_USED_FIELD_NUMBER: _ClassVar[int]
    CPU_CORES_FIELD_NUMBER: _ClassVar[int]
    CPU_USAGE_FIELD_NUMBER: _ClassVar[int]
    INCOMING_BANDWIDTH_SPEED_FIELD_NUMBER: _ClassVar[int]
    OUTGOING_BANDWIDTH_SPEED_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    mem_total: int
    mem_used: int
    cpu_cores: int
    cpu_usage: float
    incoming_bandwidth_speed: int
    outgoing_bandwidth_speed: int
    uptime: int
    def __init__(self, mem_total: _Optional[int] = ..., mem_used: _Optional[int] = ..., cpu_cores: _Optional[int] = ..., cpu_usage: _Optional[float] = ..., incoming_bandwidth_speed: _Optional[int] = ..., outgoing_bandwidth_speed: _Optional[int] = ..., uptime: _Optional[int] = ...) -> None: ...

class Vmess(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class Vless(_message.Message):
    __slots__ = ("id", "flow")
    ID_FIELD_NUMBER: _ClassVar[int]
    FLOW_FIELD_NUMBER: _ClassVar[int]
    id: str
    flow: str
    def __init__(self, id: _Optional[str] = ..., flow: _Optional[str] = ...) -> None: ...

class Trojan(_message.Message):
    __slots__ = ("password",)
    PASSWORD_FIELD_NUMBER: _ClassVar[int]
    password: str
    def __init__(self, password: _Optional[str] = ...) -> None: ...

class Shadowsocks(_message.Message):
    __slots__ = ("password", "method")
    PASSWORD_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    password: str
    method: str
    def __init__(self, password: _Optional[str] = ..., method: _Optional[str] = ...) -> None: ...

class Wireguard(_message.Message):
    __slots__ = ("public_key", "peer_ips")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    PEER_IPS_FIELD_NUMBER: _ClassVar[int]
    public_key: str
    peer_ips: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, public_key: _Optional[str] = ..., peer_ips: _Optional[_Iterable[str]] = ...) -> None: ...

class Hysteria(_message.Message):
    __slots__ = ("auth",)
    AUTH_FIELD_NUMBER: _ClassVar[int]
    auth: str
    def __init__(self, auth: _Optional[str] = ...) -> None: ...

class Masque(_message.Message):
    __slots__ = ()
    PASS_FIELD_NUMBER: _ClassVar[int]
    def __init__(self, **kwargs) -> None: ...

class Proxy(_message.Message):
    __slots__ = ("vmess", "vless", "trojan", "shadowsocks", "wireguard", "hysteria", "masque")
    VMESS_FIELD_NUMBER: _ClassVar[int]
    VLESS_FIELD_NUMBER: _ClassVar[int]
    TROJAN_FIELD_NUMBER: _ClassVar[int]
    SHADOWSOCKS_FIELD_NUMBER: _ClassVar[int]
    WIREGUARD_FIELD_NUMBER: _ClassVar[int]
    HYSTERIA_FIELD_NUMBER: _ClassVar[int]
    MASQUE_FIELD_NUMBER: _ClassVar[int]
    vmess: Vmess
    vless: Vless
    trojan: Trojan
    shadowsocks: Shadowsocks
    wireguard: Wireguard
    hysteria: Hysteria
    masque: Masque
    def __init__(self, vmess: _Optional[_Union[Vmess, _Mapping]] = ..., vless: _Optional[_Union[Vless, _Mapping]] = ..., trojan: _Optional[_Union[Trojan, _Mapping]] = ..., shadowsocks: _Optional[_Union[Shadowsocks, _Mapping]] = ..., wireguard: _Optional[_Union[Wireguard, _Mapping]] = ..., hysteria: _Optional[_Union[Hysteria, _Mapping]] = ..., masque: _Optional[_Union[Masque, _Mapping]] = ...) -> None: ...

class User(_message.Message):
    __slots__ = ("email", "proxies", "inbounds", "limits")
    EMAIL_FIELD_NUMBER: _ClassVar[int]
    PROXIES_FIELD_NUMBER: _ClassVar[int]
    INBOUNDS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    email: str
    proxies: Proxy
    inbounds: _containers.RepeatedScalarFieldContainer[str]
    limits: Limits
    def __init__(self, email: _Optional[str] = ..., proxies: _Optional[_Union[Proxy, _Mapping]] = ..., inbounds: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("bytes", "expires_at", "expires_action", "addresses", "addresses_action", "speed", "abuse_action")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_ACTION_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_ACTION_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    ABUSE_ACTION_FIELD_NUMBER: _ClassVar[int]
    bytes: Quota
    expires_at: int
    expires_action: LimitAction
    addresses: int
    addresses_action: LimitAction
    speed: Speed
    abuse_action: LimitAction
    def __init__(self, bytes: _Optional[_Union[Quota, _Mapping]] = ..., expires_at: _Optional[int] = ..., expires_action: _Optional[_Union[LimitAction, str]] = ..., addresses: _Optional[int] = ..., addresses_action: _Optional[_Union[LimitAction, str]] = ..., speed: _Optional[_Union[Speed, _Mapping]] = ..., abuse_action: _Optional[_Union[LimitAction, str]] = ...) -> None: ...

class Quota(_message.Message):
    __slots__ = ("bytes", "way", "since", "used", "period", "reset_day", "action")
    class Way(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        BOTH: _ClassVar[Quota.Way]
        UP: _ClassVar[Quota.Way]
        DOWN: _ClassVar[Quota.Way]
    BOTH: Quota.Way
    UP: Quota.Way
    DOWN: Quota.Way
    class Period(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NEVER: _ClassVar[Quota.Period]
        DAY: _ClassVar[Quota.Period]
        WEEK: _ClassVar[Quota.Period]
        MONTH: _ClassVar[Quota.Period]
    NEVER: Quota.Period
    DAY: Quota.Period
    WEEK: Quota.Period
    MONTH: Quota.Period
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    RESET_DAY_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    way: Quota.Way
    since: int
    used: int
    period: Quota.Period
    reset_day: int
    action: LimitAction
    def __init__(self, bytes: _Optional[int] = ..., way: _Optional[_Union[Quota.Way, str]] = ..., since: _Optional[int] = ..., used: _Optional[int] = ..., period: _Optional[_Union[Quota.Period, str]] = ..., reset_day: _Optional[int] = ..., action: _Optional[_Union[LimitAction, str]] = ...) -> None: ...

class Speed(_message.Message):
    __slots__ = ("down", "up")
    DOWN_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    down: int
    up: int
    def __init__(self, down: _Optional[int] = ..., up: _Optional[int] = ...) -> None: ...

class UserLimits(_message.Message):
    __slots__ = ("name", "limits")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    name: str
    limits: Limits
    def __init__(self, name: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class SetLimitsRequest(_message.Message):
    __slots__ = ("users",)
    USERS_FIELD_NUMBER: _ClassVar[int]
    users: _containers.RepeatedCompositeFieldContainer[UserLimits]
    def __init__(self, users: _Optional[_Iterable[_Union[UserLimits, _Mapping]]] = ...) -> None: ...

class SetLimitsResponse(_message.Message):
    __slots__ = ("notes",)
    class Note(_message.Message):
        __slots__ = ("name", "text")
        NAME_FIELD_NUMBER: _ClassVar[int]
        TEXT_FIELD_NUMBER: _ClassVar[int]
        name: str
        text: str
        def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...
    NOTES_FIELD_NUMBER: _ClassVar[int]
    notes: _containers.RepeatedCompositeFieldContainer[SetLimitsResponse.Note]
    def __init__(self, notes: _Optional[_Iterable[_Union[SetLimitsResponse.Note, _Mapping]]] = ...) -> None: ...

class GetLimitsRequest(_message.Message):
    __slots__ = ("after", "limit", "names", "off")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    after: str
    limit: int
    names: _containers.RepeatedScalarFieldContainer[str]
    off: bool
    def __init__(self, after: _Optional[str] = ..., limit: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., off: bool = ...) -> None: ...

class LimitState(_message.Message):
    __slots__ = ("name", "limits", "used_up", "used_down", "left", "counted_since", "resets_at", "addresses", "off_since", "off_for", "notes", "cut_until", "slow_until", "weighted_up", "weighted_down")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    USED_UP_FIELD_NUMBER: _ClassVar[int]
    USED_DOWN_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    COUNTED_SINCE_FIELD_NUMBER: _ClassVar[int]
    RESETS_AT_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    OFF_SINCE_FIELD_NUMBER: _ClassVar[int]
    OFF_FOR_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    CUT_UNTIL_FIELD_NUMBER: _ClassVar[int]
    SLOW_UNTIL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_UP_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_DOWN_FIELD_NUMBER: _ClassVar[int]
    name: str
    limits: Limits
    used_up: int
    used_down: int
    left: int
    counted_since: float
    resets_at: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    off_since: float
    off_for: _containers.RepeatedScalarFieldContainer[str]
    notes: _containers.RepeatedScalarFieldContainer[str]
    cut_until: int
    slow_until: int
    weighted_up: int
    weighted_down: int
    def __init__(self, name: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., used_up: _Optional[int] = ..., used_down: _Optional[int] = ..., left: _Optional[int] = ..., counted_since: _Optional[float] = ..., resets_at: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., off_since: _Optional[float] = ..., off_for: _Optional[_Iterable[str]] = ..., notes: _Optional[_Iterable[str]] = ..., cut_until: _Optional[int] = ..., slow_until: _Optional[int] = ..., weighted_up: _Optional[int] = ..., weighted_down: _Optional[int] = ...) -> None: ...

class GetLimitsResponse(_message.Message):
    __slots__ = ("users", "next", "total")
    USERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    users: _containers.RepeatedCompositeFieldContainer[LimitState]
    next: str
    total: int
    def __init__(self, users: _Optional[_Iterable[_Union[LimitState, _Mapping]]] = ..., next: _Optional[str] = ..., total: _Optional[int] = ...) -> None: ...

class LimitsSummary(_message.Message):
    __slots__ = ("limited", "off_quota", "off_expired", "near", "too_many_addresses", "node", "off_abuse", "abuse")
    class AbuseEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: AbuseCount
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[AbuseCount, _Mapping]] = ...) -> None: ...
    LIMITED_FIELD_NUMBER: _ClassVar[int]
    OFF_QUOTA_FIELD_NUMBER: _ClassVar[int]
    OFF_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    NEAR_FIELD_NUMBER: _ClassVar[int]
    TOO_MANY_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    OFF_ABUSE_FIELD_NUMBER: _ClassVar[int]
    ABUSE_FIELD_NUMBER: _ClassVar[int]
    limited: int
    off_quota: int
    off_expired: int
    near: int
    too_many_addresses: int
    node: NodeQuota
    off_abuse: int
    abuse: _containers.MessageMap[str, AbuseCount]
    def __init__(self, limited: _Optional[int] = ..., off_quota: _Optional[int] = ..., off_expired: _Optional[int] = ..., near: _Optional[int] = ..., too_many_addresses: _Optional[int] = ..., node: _Optional[_Union[NodeQuota, _Mapping]] = ..., off_abuse: _Optional[int] = ..., abuse: _Optional[_Mapping[str, AbuseCount]] = ...) -> None: ...

class AbuseCount(_message.Message):
    __slots__ = ("requests", "cases")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CASES_FIELD_NUMBER: _ClassVar[int]
    requests: int
    cases: int
    def __init__(self, requests: _Optional[int] = ..., cases: _Optional[int] = ...) -> None: ...

class NodeQuota(_message.Message):
    __slots__ = ("bytes", "used", "resets_at", "closed")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    RESETS_AT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    used: int
    resets_at: int
    closed: bool
    def __init__(self, bytes: _Optional[int] = ..., used: _Optional[int] = ..., resets_at: _Optional[int] = ..., closed: bool = ...) -> None: ...

class Users(_message.Message):
    __slots__ = ("users",)
    USERS_FIELD_NUMBER: _ClassVar[int]
    users: _containers.RepeatedCompositeFieldContainer[User]
    def __init__(self, users: _Optional[_Iterable[_Union[User, _Mapping]]] = ...) -> None: ...

class UsersChunk(_message.Message):
    __slots__ = ("users", "index", "last")
    USERS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    users: _containers.RepeatedCompositeFieldContainer[User]
    index: int
    last: bool
    def __init__(self, users: _Optional[_Iterable[_Union[User, _Mapping]]] = ..., index: _Optional[int] = ..., last: bool = ...) -> None: ...

class ListUsersRequest(_message.Message):
    __slots__ = ("after", "limit", "names", "credentials", "traffic")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    after: str
    limit: int
    names: _containers.RepeatedScalarFieldContainer[str]
    credentials: bool
    traffic: bool
    def __init__(self, after: _Optional[str] = ..., limit: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., credentials: bool = ..., traffic: bool = ...) -> None: ...

class ListedUser(_message.Message):
    __slots__ = ("name", "inbounds", "unknown", "confirmed", "leaving", "pending", "refused", "proxies", "shortened", "limits", "traffic", "used_up", "used_down", "weighted_up", "weighted_down")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INBOUNDS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PROXIES_FIELD_NUMBER: _ClassVar[int]
    SHORTENED_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    USED_UP_FIELD_NUMBER: _ClassVar[int]
    USED_DOWN_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_UP_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_DOWN_FIELD_NUMBER: _ClassVar[int]
    name: str
    inbounds: _containers.RepeatedScalarFieldContainer[str]
    unknown: _containers.RepeatedScalarFieldContainer[str]
    confirmed: _containers.RepeatedScalarFieldContainer[str]
    leaving: _containers.RepeatedScalarFieldContainer[str]
    pending: bool
    refused: _containers.RepeatedScalarFieldContainer[str]
    proxies: Proxy
    shortened: bool
    limits: Limits
    traffic: _containers.RepeatedCompositeFieldContainer[InboundBytes]
    used_up: int
    used_down: int
    weighted_up: int
    weighted_down: int
    def __init__(self, name: _Optional[str] = ..., inbounds: _Optional[_Iterable[str]] = ..., unknown: _Optional[_Iterable[str]] = ..., confirmed: _Optional[_Iterable[str]] = ..., leaving: _Optional[_Iterable[str]] = ..., pending: bool = ..., refused: _Optional[_Iterable[str]] = ..., proxies: _Optional[_Union[Proxy, _Mapping]] = ..., shortened: bool = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., traffic: _Optional[_Iterable[_Union[InboundBytes, _Mapping]]] = ..., used_up: _Optional[int] = ..., used_down: _Optional[int] = ..., weighted_up: _Optional[int] = ..., weighted_down: _Optional[int] = ...) -> None: ...

class InboundBytes(_message.Message):
    __slots__ = ("tag", "uplink", "downlink")
    TAG_FIELD_NUMBER: _ClassVar[int]
    UPLINK_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_FIELD_NUMBER: _ClassVar[int]
    tag: str
    uplink: int
    downlink: int
    def __init__(self, tag: _Optional[str] = ..., uplink: _Optional[int] = ..., downlink: _Optional[int] = ...) -> None: ...

class ListUsersResponse(_message.Message):
    __slots__ = ("users", "next", "total", "revision", "state", "credentials")
    USERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    users: _containers.RepeatedCompositeFieldContainer[ListedUser]
    next: str
    total: int
    revision: int
    state: str
    credentials: bool
    def __init__(self, users: _Optional[_Iterable[_Union[ListedUser, _Mapping]]] = ..., next: _Optional[str] = ..., total: _Optional[int] = ..., revision: _Optional[int] = ..., state: _Optional[str] = ..., credentials: bool = ...) -> None: ...

class DropConnectionsRequest(_message.Message):
    __slots__ = ("name", "address", "inbound")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INBOUND_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    inbound: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., inbound: _Optional[str] = ...) -> None: ...

class DropConnectionsResponse(_message.Message):
    __slots__ = ("ended", "users", "unsupported")
    class UnsupportedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ENDED_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    UNSUPPORTED_FIELD_NUMBER: _ClassVar[int]
    ended: int
    users: int
    unsupported: _containers.ScalarMap[str, str]
    def __init__(self, ended: _Optional[int] = ..., users: _Optional[int] = ..., unsupported: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ListOnlineRequest(_message.Message):
    __slots__ = ("after", "limit")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    after: str
    limit: int
    def __init__(self, after: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListOnlineResponse(_message.Message):
    __slots__ = ("users", "next", "total", "unsupported")
    class UnsupportedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    USERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    UNSUPPORTED_FIELD_NUMBER: _ClassVar[int]
    users: _containers.RepeatedCompositeFieldContainer[StatsOnlineIpListResponse]
    next: str
    total: int
    unsupported: _containers.ScalarMap[str, str]
    def __init__(self, users: _Optional[_Iterable[_Union[StatsOnlineIpListResponse, _Mapping]]] = ..., next: _Optional[str] = ..., total: _Optional[int] = ..., unsupported: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RoutingRule(_message.Message):
    __slots__ = ("outbound_tag", "rule_tag")
    OUTBOUND_TAG_FIELD_NUMBER: _ClassVar[int]
    RULE_TAG_FIELD_NUMBER: _ClassVar[int]
    outbound_tag: str
    rule_tag: str
    def __init__(self, outbound_tag: _Optional[str] = ..., rule_tag: _Optional[str] = ...) -> None: ...

class RoutingRulesResponse(_message.Message):
    __slots__ = ("rules",)
    RULES_FIELD_NUMBER: _ClassVar[int]
    rules: _containers.RepeatedCompositeFieldContainer[RoutingRule]
    def __init__(self, rules: _Optional[_Iterable[_Union[RoutingRule, _Mapping]]] = ...) -> None: ...

class BalancerInfoRequest(_message.Message):
    __slots__ = ("tag",)
    TAG_FIELD_NUMBER: _ClassVar[int]
    tag: str
    def __init__(self, tag: _Optional[str] = ...) -> None: ...

class BalancerInfoResponse(_message.Message):
    __slots__ = ("override_target", "principle_target")
    OVERRIDE_TARGET_FIELD_NUMBER: _ClassVar[int]
    PRINCIPLE_TARGET_FIELD_NUMBER: _ClassVar[int]
    override_target: str
    principle_target: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, override_target: _Optional[str] = ..., principle_target: _Optional[_Iterable[str]] = ...) -> None: ...

class TestRouteRequest(_message.Message):
    __slots__ = ("inbound_tag", "network", "target_ip", "target_domain", "target_port", "protocol", "user", "attributes", "field_selectors", "publish_result")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    INBOUND_TAG_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    TARGET_IP_FIELD_NUMBER: _ClassVar[int]
    TARGET_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    TARGET_PORT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    FIELD_SELECTORS_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_RESULT_FIELD_NUMBER: _ClassVar[int]
    inbound_tag: str
    network: str
    target_ip: str
    target_domain: str
    target_port: int
    protocol: str
    user: str
    attributes: _containers.ScalarMap[str, str]
    field_selectors: _containers.RepeatedScalarFieldContainer[str]
    publish_result: bool
    def __init__(self, inbound_tag: _Optional[str] = ..., network: _Optional[str] = ..., target_ip: _Optional[str] = ..., target_domain: _Optional[str] = ..., target_port: _Optional[int] = ..., protocol: _Optional[str] = ..., user: _Optional[str] = ..., attributes: _Optional[_Mapping[str, str]] = ..., field_selectors: _Optional[_Iterable[str]] = ..., publish_result: bool = ...) -> None: ...

class RouteResult(_message.Message):
    __slots__ = ("outbound_tag", "outbound_group_tags", "inbound_tag", "network", "target_domain")
    OUTBOUND_TAG_FIELD_NUMBER: _ClassVar[int]
    OUTBOUND_GROUP_TAGS_FIELD_NUMBER: _ClassVar[int]
    INBOUND_TAG_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    TARGET_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    outbound_tag: str
    outbound_group_tags: _containers.RepeatedScalarFieldContainer[str]
    inbound_tag: str
    network: str
    target_domain: str
    def __init__(self, outbound_tag: _Optional[str] = ..., outbound_group_tags: _Optional[_Iterable[str]] = ..., inbound_tag: _Optional[str] = ..., network: _Optional[str] = ..., target_domain: _Optional[str] = ...) -> None: ...

class AddRoutingRuleRequest(_message.Message):
    __slots__ = ("rule", "should_reset")
    RULE_FIELD_NUMBER: _ClassVar[int]
    SHOULD_RESET_FIELD_NUMBER: _ClassVar[int]
    rule: str
    should_reset: bool
    def __init__(self, rule: _Optional[str] = ..., should_reset: bool = ...) -> None: ...

class RemoveRoutingRuleRequest(_message.Message):
    __slots__ = ("rule_tag",)
    RULE_TAG_FIELD_NUMBER: _ClassVar[int]
    rule_tag: str
    def __init__(self, rule_tag: _Optional[str] = ...) -> None: ...

class OverrideBalancerTargetRequest(_message.Message):
    __slots__ = ("balancer_tag", "target")
    BALANCER_TAG_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    balancer_tag: str
    target: str
    def __init__(self, balancer_tag: _Optional[str] = ..., target: _Optional[str] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("since", "epoch", "kinds", "follow")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    since: int
    epoch: str
    kinds: _containers.RepeatedScalarFieldContainer[str]
    follow: bool
    def __init__(self, since: _Optional[int] = ..., epoch: _Optional[str] = ..., kinds: _Optional[_Iterable[str]] = ..., follow: bool = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("sequence", "epoch", "time", "kind", "severity", "text", "fields")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    epoch: str
    time: float
    kind: str
    severity: str
    text: str
    fields: _containers.ScalarMap[str, str]
    def __init__(self, sequence: _Optional[int] = ..., epoch: _Optional[str] = ..., time: _Optional[float] = ..., kind: _Optional[str] = ..., severity: _Optional[str] = ..., text: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ...) -> None: ...

class UpdateCoreRequest(_message.Message):
    __slots__ = ("type", "version", "sha256", "back")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BACK_FIELD_NUMBER: _ClassVar[int]
    type: BackendType
    version: str
    sha256: str
    back: bool
    def __init__(self, type: _Optional[_Union[BackendType, str]] = ..., version: _Optional[str] = ..., sha256: _Optional[str] = ..., back: bool = ...) -> None: ...

class GeoFile(_message.Message):
    __slots__ = ("name", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    sha256: str
    def __init__(self, name: _Optional[str] = ..., sha256: _Optional[str] = ...) -> None: ...

class UpdateGeoFilesRequest(_message.Message):
    __slots__ = ("files", "back")
    FILES_FIELD_NUMBER: _ClassVar[int]
    BACK_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[GeoFile]
    back: bool
    def __init__(self, files: _Optional[_Iterable[_Union[GeoFile, _Mapping]]] = ..., back: bool = ...) -> None: ...

class UpdateNodeRequest(_message.Message):
    __slots__ = ("version", "sha256")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    version: str
    sha256: str
    def __init__(self, version: _Optional[str] = ..., sha256: _Optional[str] = ...) -> None: ...

class JobRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class Jobs(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("id", "kind", "subject", "state", "text", "fetched", "total", "began", "ended", "before", "after")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    id: str
    kind: str
    subject: str
    state: str
    text: str
    fetched: int
    total: int
    began: float
    ended: float
    before: str
    after: str
    def __init__(self, id: _Optional[str] = ..., kind: _Optional[str] = ..., subject: _Optional[str] = ..., state: _Optional[str] = ..., text: _Optional[str] = ..., fetched: _Optional[int] = ..., total: _Optional[int] = ..., began: _Optional[float] = ..., ended: _Optional[float] = ..., before: _Optional[str] = ..., after: _Optional[str] = ...) -> None: ...
