from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TypedMessage(_message.Message):
    __slots__ = ("type", "value")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    type: str
    value: bytes
    def __init__(self, type: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class Config(_message.Message):
    __slots__ = ("inbound", "outbound", "app")
    INBOUND_FIELD_NUMBER: _ClassVar[int]
    OUTBOUND_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    inbound: _containers.RepeatedCompositeFieldContainer[InboundHandlerConfig]
    outbound: _containers.RepeatedCompositeFieldContainer[OutboundHandlerConfig]
    app: _containers.RepeatedCompositeFieldContainer[TypedMessage]
    def __init__(self, inbound: _Optional[_Iterable[_Union[InboundHandlerConfig, _Mapping]]] = ..., outbound: _Optional[_Iterable[_Union[OutboundHandlerConfig, _Mapping]]] = ..., app: _Optional[_Iterable[_Union[TypedMessage, _Mapping]]] = ...) -> None: ...

class InboundHandlerConfig(_message.Message):
    __slots__ = ("tag", "receiver_settings", "proxy_settings")
    TAG_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PROXY_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    tag: str
    receiver_settings: TypedMessage
    proxy_settings: TypedMessage
    def __init__(self, tag: _Optional[str] = ..., receiver_settings: _Optional[_Union[TypedMessage, _Mapping]] = ..., proxy_settings: _Optional[_Union[TypedMessage, _Mapping]] = ...) -> None: ...

class OutboundHandlerConfig(_message.Message):
    __slots__ = ("tag", "sender_settings", "proxy_settings")
    TAG_FIELD_NUMBER: _ClassVar[int]
    SENDER_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PROXY_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    tag: str
    sender_settings: TypedMessage
    proxy_settings: TypedMessage
    def __init__(self, tag: _Optional[str] = ..., sender_settings: _Optional[_Union[TypedMessage, _Mapping]] = ..., proxy_settings: _Optional[_Union[TypedMessage, _Mapping]] = ...) -> None: ...

class User(_message.Message):
    __slots__ = ("level", "email", "account")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    EMAIL_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    level: int
    email: str
    account: TypedMessage
    def __init__(self, level: _Optional[int] = ..., email: _Optional[str] = ..., account: _Optional[_Union[TypedMessage, _Mapping]] = ...) -> None: ...

class VlessAccount(_message.Message):
    __slots__ = ("id", "flow", "reverse")
    ID_FIELD_NUMBER: _ClassVar[int]
    FLOW_FIELD_NUMBER: _ClassVar[int]
    REVERSE_FIELD_NUMBER: _ClassVar[int]
    id: str
    flow: str
    reverse: VlessReverse
    def __init__(self, id: _Optional[str] = ..., flow: _Optional[str] = ..., reverse: _Optional[_Union[VlessReverse, _Mapping]] = ...) -> None: ...

class VlessReverse(_message.Message):
    __slots__ = ("tag",)
    TAG_FIELD_NUMBER: _ClassVar[int]
    tag: str
    def __init__(self, tag: _Optional[str] = ...) -> None: ...

class VmessAccount(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class TrojanAccount(_message.Message):
    __slots__ = ("password",)
    PASSWORD_FIELD_NUMBER: _ClassVar[int]
    password: str
    def __init__(self, password: _Optional[str] = ...) -> None: ...

class ShadowsocksAccount(_message.Message):
    __slots__ = ("password", "cipher_type")
    PASSWORD_FIELD_NUMBER: _ClassVar[int]
    CIPHER_TYPE_FIELD_NUMBER: _ClassVar[int]
    password: str
    cipher_type: int
    def __init__(self, password: _Optional[str] = ..., cipher_type: _Optional[int] = ...) -> None: ...

class Shadowsocks2022Account(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class HysteriaAccount(_message.Message):
    __slots__ = ("auth",)
    AUTH_FIELD_NUMBER: _ClassVar[int]
    auth: str
    def __init__(self, auth: _Optional[str] = ...) -> None: ...

class WireguardAccount(_message.Message):
    __slots__ = ("public_key", "allowed_ips")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_IPS_FIELD_NUMBER: _ClassVar[int]
    public_key: str
    allowed_ips: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, public_key: _Optional[str] = ..., allowed_ips: _Optional[_Iterable[str]] = ...) -> None: ...

class UsersConfig(_message.Message):
    __slots__ = ("users",)
    USERS_FIELD_NUMBER: _ClassVar[int]
    users: _containers.RepeatedCompositeFieldContainer[User]
    def __init__(self, users: _Optional[_Iterable[_Union[User, _Mapping]]] = ...) -> None: ...

class VlessInboundConfig(_message.Message):
    __slots__ = ("users", "decryption")
    USERS_FIELD_NUMBER: _ClassVar[int]
    DECRYPTION_FIELD_NUMBER: _ClassVar[int]
    users: _containers.RepeatedCompositeFieldContainer[User]
    decryption: str
    def __init__(self, users: _Optional[_Iterable[_Union[User, _Mapping]]] = ..., decryption: _Optional[str] = ...) -> None: ...

class FallbacksConfig(_message.Message):
    __slots__ = ("fallbacks",)
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    fallbacks: _containers.RepeatedCompositeFieldContainer[Fallback]
    def __init__(self, fallbacks: _Optional[_Iterable[_Union[Fallback, _Mapping]]] = ...) -> None: ...

class Fallback(_message.Message):
    __slots__ = ("type", "dest")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    DEST_FIELD_NUMBER: _ClassVar[int]
    type: str
    dest: str
    def __init__(self, type: _Optional[str] = ..., dest: _Optional[str] = ...) -> None: ...

class Shadowsocks2022ServerConfig(_message.Message):
    __slots__ = ("method", "key", "network")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    method: str
    key: str
    network: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, method: _Optional[str] = ..., key: _Optional[str] = ..., network: _Optional[_Iterable[int]] = ...) -> None: ...

class Shadowsocks2022MultiUserConfig(_message.Message):
    __slots__ = ("method", "key", "users", "network")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    method: str
    key: str
    users: _containers.RepeatedCompositeFieldContainer[User]
    network: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, method: _Optional[str] = ..., key: _Optional[str] = ..., users: _Optional[_Iterable[_Union[User, _Mapping]]] = ..., network: _Optional[_Iterable[int]] = ...) -> None: ...

class WireguardConfig(_message.Message):
    __slots__ = ("secret_key", "users", "is_client")
    SECRET_KEY_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    IS_CLIENT_FIELD_NUMBER: _ClassVar[int]
    secret_key: str
    users: _containers.RepeatedCompositeFieldContainer[User]
    is_client: bool
    def __init__(self, secret_key: _Optional[str] = ..., users: _Optional[_Iterable[_Union[User, _Mapping]]] = ..., is_client: bool = ...) -> None: ...

class ServerEndpoint(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: IPOrDomain
    def __init__(self, address: _Optional[_Union[IPOrDomain, _Mapping]] = ...) -> None: ...

class DestinationOverride(_message.Message):
    __slots__ = ("server",)
    SERVER_FIELD_NUMBER: _ClassVar[int]
    server: ServerEndpoint
    def __init__(self, server: _Optional[_Union[ServerEndpoint, _Mapping]] = ...) -> None: ...

class FreedomConfig(_message.Message):
    __slots__ = ("domain_strategy", "destination_override", "final_rules")
    DOMAIN_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_OVERRIDE_FIELD_NUMBER: _ClassVar[int]
    FINAL_RULES_FIELD_NUMBER: _ClassVar[int]
    domain_strategy: int
    destination_override: DestinationOverride
    final_rules: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, domain_strategy: _Optional[int] = ..., destination_override: _Optional[_Union[DestinationOverride, _Mapping]] = ..., final_rules: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DokodemoConfig(_message.Message):
    __slots__ = ("address", "port", "follow_redirect", "networks")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_REDIRECT_FIELD_NUMBER: _ClassVar[int]
    NETWORKS_FIELD_NUMBER: _ClassVar[int]
    address: IPOrDomain
    port: int
    follow_redirect: bool
    networks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, address: _Optional[_Union[IPOrDomain, _Mapping]] = ..., port: _Optional[int] = ..., follow_redirect: bool = ..., networks: _Optional[_Iterable[int]] = ...) -> None: ...

class IPOrDomain(_message.Message):
    __slots__ = ("ip", "domain")
    IP_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    ip: bytes
    domain: str
    def __init__(self, ip: _Optional[bytes] = ..., domain: _Optional[str] = ...) -> None: ...

class PortRange(_message.Message):
    __slots__ = ("first", "last")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class PortList(_message.Message):
    __slots__ = ("range",)
    RANGE_FIELD_NUMBER: _ClassVar[int]
    range: _containers.RepeatedCompositeFieldContainer[PortRange]
    def __init__(self, range: _Optional[_Iterable[_Union[PortRange, _Mapping]]] = ...) -> None: ...

class ReceiverConfig(_message.Message):
    __slots__ = ("port_list", "listen", "stream_settings", "sniffing_settings")
    PORT_LIST_FIELD_NUMBER: _ClassVar[int]
    LISTEN_FIELD_NUMBER: _ClassVar[int]
    STREAM_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SNIFFING_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    port_list: PortList
    listen: IPOrDomain
    stream_settings: StreamConfig
    sniffing_settings: SniffingConfig
    def __init__(self, port_list: _Optional[_Union[PortList, _Mapping]] = ..., listen: _Optional[_Union[IPOrDomain, _Mapping]] = ..., stream_settings: _Optional[_Union[StreamConfig, _Mapping]] = ..., sniffing_settings: _Optional[_Union[SniffingConfig, _Mapping]] = ...) -> None: ...

class SniffingConfig(_message.Message):
    __slots__ = ("enabled", "metadata_only", "route_only")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    METADATA_ONLY_FIELD_NUMBER: _ClassVar[int]
    ROUTE_ONLY_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    metadata_only: bool
    route_only: bool
    def __init__(self, enabled: bool = ..., metadata_only: bool = ..., route_only: bool = ...) -> None: ...

class SenderConfig(_message.Message):
    __slots__ = ("stream_settings", "proxy_settings")
    STREAM_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PROXY_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    stream_settings: StreamConfig
    proxy_settings: ProxyConfig
    def __init__(self, stream_settings: _Optional[_Union[StreamConfig, _Mapping]] = ..., proxy_settings: _Optional[_Union[ProxyConfig, _Mapping]] = ...) -> None: ...

class ProxyConfig(_message.Message):
    __slots__ = ("tag",)
    TAG_FIELD_NUMBER: _ClassVar[int]
    tag: str
    def __init__(self, tag: _Optional[str] = ...) -> None: ...

class TransportConfig(_message.Message):
    __slots__ = ("settings", "protocol_name")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_NAME_FIELD_NUMBER: _ClassVar[int]
    settings: TypedMessage
    protocol_name: str
    def __init__(self, settings: _Optional[_Union[TypedMessage, _Mapping]] = ..., protocol_name: _Optional[str] = ...) -> None: ...

class StreamConfig(_message.Message):
    __slots__ = ("transport_settings", "security_type", "security_settings", "protocol_name", "socket_settings")
    TRANSPORT_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SECURITY_TYPE_FIELD_NUMBER: _ClassVar[int]
    SECURITY_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_NAME_FIELD_NUMBER: _ClassVar[int]
    SOCKET_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    transport_settings: _containers.RepeatedCompositeFieldContainer[TransportConfig]
    security_type: str
    security_settings: _containers.RepeatedCompositeFieldContainer[TypedMessage]
    protocol_name: str
    socket_settings: SocketConfig
    def __init__(self, transport_settings: _Optional[_Iterable[_Union[TransportConfig, _Mapping]]] = ..., security_type: _Optional[str] = ..., security_settings: _Optional[_Iterable[_Union[TypedMessage, _Mapping]]] = ..., protocol_name: _Optional[str] = ..., socket_settings: _Optional[_Union[SocketConfig, _Mapping]] = ...) -> None: ...

class SocketConfig(_message.Message):
    __slots__ = ("tproxy", "accept_proxy_protocol", "dialer_proxy", "interface", "tcp_mptcp", "trusted_x_forwarded_for")
    TPROXY_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_PROXY_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DIALER_PROXY_FIELD_NUMBER: _ClassVar[int]
    INTERFACE_FIELD_NUMBER: _ClassVar[int]
    TCP_MPTCP_FIELD_NUMBER: _ClassVar[int]
    TRUSTED_X_FORWARDED_FOR_FIELD_NUMBER: _ClassVar[int]
    tproxy: int
    accept_proxy_protocol: bool
    dialer_proxy: str
    interface: str
    tcp_mptcp: bool
    trusted_x_forwarded_for: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tproxy: _Optional[int] = ..., accept_proxy_protocol: bool = ..., dialer_proxy: _Optional[str] = ..., interface: _Optional[str] = ..., tcp_mptcp: bool = ..., trusted_x_forwarded_for: _Optional[_Iterable[str]] = ...) -> None: ...

class TlsCertificate(_message.Message):
    __slots__ = ("certificate_path", "key_path")
    CERTIFICATE_PATH_FIELD_NUMBER: _ClassVar[int]
    KEY_PATH_FIELD_NUMBER: _ClassVar[int]
    certificate_path: str
    key_path: str
    def __init__(self, certificate_path: _Optional[str] = ..., key_path: _Optional[str] = ...) -> None: ...

class TlsConfig(_message.Message):
    __slots__ = ("certificate", "next_protocol", "master_key_log")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    NEXT_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MASTER_KEY_LOG_FIELD_NUMBER: _ClassVar[int]
    certificate: _containers.RepeatedCompositeFieldContainer[TlsCertificate]
    next_protocol: _containers.RepeatedScalarFieldContainer[str]
    master_key_log: str
    def __init__(self, certificate: _Optional[_Iterable[_Union[TlsCertificate, _Mapping]]] = ..., next_protocol: _Optional[_Iterable[str]] = ..., master_key_log: _Optional[str] = ...) -> None: ...

class RealityConfig(_message.Message):
    __slots__ = ("show", "dest", "type", "min_client_ver", "master_key_log")
    SHOW_FIELD_NUMBER: _ClassVar[int]
    DEST_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MIN_CLIENT_VER_FIELD_NUMBER: _ClassVar[int]
    MASTER_KEY_LOG_FIELD_NUMBER: _ClassVar[int]
    show: bool
    dest: str
    type: str
    min_client_ver: bytes
    master_key_log: str
    def __init__(self, show: bool = ..., dest: _Optional[str] = ..., type: _Optional[str] = ..., min_client_ver: _Optional[bytes] = ..., master_key_log: _Optional[str] = ...) -> None: ...

class TcpConfig(_message.Message):
    __slots__ = ("header_settings", "accept_proxy_protocol")
    HEADER_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_PROXY_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    header_settings: TypedMessage
    accept_proxy_protocol: bool
    def __init__(self, header_settings: _Optional[_Union[TypedMessage, _Mapping]] = ..., accept_proxy_protocol: bool = ...) -> None: ...

class UpgradeConfig(_message.Message):
    __slots__ = ("accept_proxy_protocol",)
    ACCEPT_PROXY_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    accept_proxy_protocol: bool
    def __init__(self, accept_proxy_protocol: bool = ...) -> None: ...

class SplitHttpConfig(_message.Message):
    __slots__ = ("download_settings",)
    DOWNLOAD_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    download_settings: StreamConfig
    def __init__(self, download_settings: _Optional[_Union[StreamConfig, _Mapping]] = ...) -> None: ...

class HysteriaTransportConfig(_message.Message):
    __slots__ = ("auth", "masq_type", "masq_file")
    AUTH_FIELD_NUMBER: _ClassVar[int]
    MASQ_TYPE_FIELD_NUMBER: _ClassVar[int]
    MASQ_FILE_FIELD_NUMBER: _ClassVar[int]
    auth: str
    masq_type: str
    masq_file: str
    def __init__(self, auth: _Optional[str] = ..., masq_type: _Optional[str] = ..., masq_file: _Optional[str] = ...) -> None: ...

class CommanderConfig(_message.Message):
    __slots__ = ("tag", "service", "listen")
    TAG_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    LISTEN_FIELD_NUMBER: _ClassVar[int]
    tag: str
    service: _containers.RepeatedCompositeFieldContainer[TypedMessage]
    listen: str
    def __init__(self, tag: _Optional[str] = ..., service: _Optional[_Iterable[_Union[TypedMessage, _Mapping]]] = ..., listen: _Optional[str] = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("stats",)
    class Stats(_message.Message):
        __slots__ = ("user_uplink", "user_downlink", "user_online")
        USER_UPLINK_FIELD_NUMBER: _ClassVar[int]
        USER_DOWNLINK_FIELD_NUMBER: _ClassVar[int]
        USER_ONLINE_FIELD_NUMBER: _ClassVar[int]
        user_uplink: bool
        user_downlink: bool
        user_online: bool
        def __init__(self, user_uplink: bool = ..., user_downlink: bool = ..., user_online: bool = ...) -> None: ...
    STATS_FIELD_NUMBER: _ClassVar[int]
    stats: Policy.Stats
    def __init__(self, stats: _Optional[_Union[Policy.Stats, _Mapping]] = ...) -> None: ...

class SystemPolicy(_message.Message):
    __slots__ = ("stats",)
    class Stats(_message.Message):
        __slots__ = ("inbound_uplink", "inbound_downlink", "outbound_uplink", "outbound_downlink")
        INBOUND_UPLINK_FIELD_NUMBER: _ClassVar[int]
        INBOUND_DOWNLINK_FIELD_NUMBER: _ClassVar[int]
        OUTBOUND_UPLINK_FIELD_NUMBER: _ClassVar[int]
        OUTBOUND_DOWNLINK_FIELD_NUMBER: _ClassVar[int]
        inbound_uplink: bool
        inbound_downlink: bool
        outbound_uplink: bool
        outbound_downlink: bool
        def __init__(self, inbound_uplink: bool = ..., inbound_downlink: bool = ..., outbound_uplink: bool = ..., outbound_downlink: bool = ...) -> None: ...
    STATS_FIELD_NUMBER: _ClassVar[int]
    stats: SystemPolicy.Stats
    def __init__(self, stats: _Optional[_Union[SystemPolicy.Stats, _Mapping]] = ...) -> None: ...

class PolicyConfig(_message.Message):
    __slots__ = ("level", "system")
    class LevelEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: Policy
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[Policy, _Mapping]] = ...) -> None: ...
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    level: _containers.MessageMap[int, Policy]
    system: SystemPolicy
    def __init__(self, level: _Optional[_Mapping[int, Policy]] = ..., system: _Optional[_Union[SystemPolicy, _Mapping]] = ...) -> None: ...

class LogConfig(_message.Message):
    __slots__ = ("error_log_type", "error_log_level", "error_log_path", "access_log_type", "access_log_path", "enable_dns_log", "mask_address")
    ERROR_LOG_TYPE_FIELD_NUMBER: _ClassVar[int]
    ERROR_LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    ERROR_LOG_PATH_FIELD_NUMBER: _ClassVar[int]
    ACCESS_LOG_TYPE_FIELD_NUMBER: _ClassVar[int]
    ACCESS_LOG_PATH_FIELD_NUMBER: _ClassVar[int]
    ENABLE_DNS_LOG_FIELD_NUMBER: _ClassVar[int]
    MASK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    error_log_type: int
    error_log_level: int
    error_log_path: str
    access_log_type: int
    access_log_path: str
    enable_dns_log: bool
    mask_address: str
    def __init__(self, error_log_type: _Optional[int] = ..., error_log_level: _Optional[int] = ..., error_log_path: _Optional[str] = ..., access_log_type: _Optional[int] = ..., access_log_path: _Optional[str] = ..., enable_dns_log: bool = ..., mask_address: _Optional[str] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: IPOrDomain
    def __init__(self, address: _Optional[_Union[IPOrDomain, _Mapping]] = ...) -> None: ...

class NameServer(_message.Message):
    __slots__ = ("address", "domain", "skip_fallback", "tag", "final_query", "unexpected", "unprior")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    SKIP_FALLBACK_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    FINAL_QUERY_FIELD_NUMBER: _ClassVar[int]
    UNEXPECTED_FIELD_NUMBER: _ClassVar[int]
    UNPRIOR_FIELD_NUMBER: _ClassVar[int]
    address: Endpoint
    domain: _containers.RepeatedScalarFieldContainer[bytes]
    skip_fallback: bool
    tag: str
    final_query: bool
    unexpected: _containers.RepeatedScalarFieldContainer[bytes]
    unprior: bool
    def __init__(self, address: _Optional[_Union[Endpoint, _Mapping]] = ..., domain: _Optional[_Iterable[bytes]] = ..., skip_fallback: bool = ..., tag: _Optional[str] = ..., final_query: bool = ..., unexpected: _Optional[_Iterable[bytes]] = ..., unprior: bool = ...) -> None: ...

class HostMapping(_message.Message):
    __slots__ = ("ip", "proxied_domain")
    IP_FIELD_NUMBER: _ClassVar[int]
    PROXIED_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    ip: _containers.RepeatedScalarFieldContainer[bytes]
    proxied_domain: str
    def __init__(self, ip: _Optional[_Iterable[bytes]] = ..., proxied_domain: _Optional[str] = ...) -> None: ...

class DnsConfig(_message.Message):
    __slots__ = ("static_hosts", "name_server", "tag")
    STATIC_HOSTS_FIELD_NUMBER: _ClassVar[int]
    NAME_SERVER_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    static_hosts: _containers.RepeatedCompositeFieldContainer[HostMapping]
    name_server: _containers.RepeatedCompositeFieldContainer[NameServer]
    tag: str
    def __init__(self, static_hosts: _Optional[_Iterable[_Union[HostMapping, _Mapping]]] = ..., name_server: _Optional[_Iterable[_Union[NameServer, _Mapping]]] = ..., tag: _Optional[str] = ...) -> None: ...

class RouterConfig(_message.Message):
    __slots__ = ("domain_strategy", "rule", "balancing_rule")
    DOMAIN_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    BALANCING_RULE_FIELD_NUMBER: _ClassVar[int]
    domain_strategy: int
    rule: _containers.RepeatedCompositeFieldContainer[RoutingRule]
    balancing_rule: _containers.RepeatedCompositeFieldContainer[BalancingRule]
    def __init__(self, domain_strategy: _Optional[int] = ..., rule: _Optional[_Iterable[_Union[RoutingRule, _Mapping]]] = ..., balancing_rule: _Optional[_Iterable[_Union[BalancingRule, _Mapping]]] = ...) -> None: ...

class RoutingRule(_message.Message):
    __slots__ = ("tag", "domain", "user_email", "inbound_tag", "protocol", "balancing_tag", "port_list", "rule_tag", "webhook")
    TAG_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    USER_EMAIL_FIELD_NUMBER: _ClassVar[int]
    INBOUND_TAG_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    BALANCING_TAG_FIELD_NUMBER: _ClassVar[int]
    PORT_LIST_FIELD_NUMBER: _ClassVar[int]
    RULE_TAG_FIELD_NUMBER: _ClassVar[int]
    WEBHOOK_FIELD_NUMBER: _ClassVar[int]
    tag: str
    domain: _containers.RepeatedScalarFieldContainer[bytes]
    user_email: _containers.RepeatedScalarFieldContainer[str]
    inbound_tag: _containers.RepeatedScalarFieldContainer[str]
    protocol: _containers.RepeatedScalarFieldContainer[str]
    balancing_tag: str
    port_list: PortList
    rule_tag: str
    webhook: WebhookConfig
    def __init__(self, tag: _Optional[str] = ..., domain: _Optional[_Iterable[bytes]] = ..., user_email: _Optional[_Iterable[str]] = ..., inbound_tag: _Optional[_Iterable[str]] = ..., protocol: _Optional[_Iterable[str]] = ..., balancing_tag: _Optional[str] = ..., port_list: _Optional[_Union[PortList, _Mapping]] = ..., rule_tag: _Optional[str] = ..., webhook: _Optional[_Union[WebhookConfig, _Mapping]] = ...) -> None: ...

class WebhookConfig(_message.Message):
    __slots__ = ("url",)
    URL_FIELD_NUMBER: _ClassVar[int]
    url: str
    def __init__(self, url: _Optional[str] = ...) -> None: ...

class BalancingRule(_message.Message):
    __slots__ = ("tag", "outbound_selector")
    TAG_FIELD_NUMBER: _ClassVar[int]
    OUTBOUND_SELECTOR_FIELD_NUMBER: _ClassVar[int]
    tag: str
    outbound_selector: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tag: _Optional[str] = ..., outbound_selector: _Optional[_Iterable[str]] = ...) -> None: ...

class ObservatoryConfig(_message.Message):
    __slots__ = ("subject_selector",)
    SUBJECT_SELECTOR_FIELD_NUMBER: _ClassVar[int]
    subject_selector: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, subject_selector: _Optional[_Iterable[str]] = ...) -> None: ...

class ReverseConfig(_message.Message):
    __slots__ = ("portal_config",)
    PORTAL_CONFIG_FIELD_NUMBER: _ClassVar[int]
    portal_config: _containers.RepeatedCompositeFieldContainer[PortalConfig]
    def __init__(self, portal_config: _Optional[_Iterable[_Union[PortalConfig, _Mapping]]] = ...) -> None: ...

class PortalConfig(_message.Message):
    __slots__ = ("tag",)
    TAG_FIELD_NUMBER: _ClassVar[int]
    tag: str
    def __init__(self, tag: _Optional[str] = ...) -> None: ...

class GeodataConfig(_message.Message):
    __slots__ = ("cron", "assets")
    CRON_FIELD_NUMBER: _ClassVar[int]
    ASSETS_FIELD_NUMBER: _ClassVar[int]
    cron: str
    assets: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, cron: _Optional[str] = ..., assets: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Cidr(_message.Message):
    __slots__ = ("ip", "prefix")
    IP_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    ip: bytes
    prefix: int
    def __init__(self, ip: _Optional[bytes] = ..., prefix: _Optional[int] = ...) -> None: ...

class GeoIp(_message.Message):
    __slots__ = ("country_code", "cidr")
    COUNTRY_CODE_FIELD_NUMBER: _ClassVar[int]
    CIDR_FIELD_NUMBER: _ClassVar[int]
    country_code: str
    cidr: _containers.RepeatedCompositeFieldContainer[Cidr]
    def __init__(self, country_code: _Optional[str] = ..., cidr: _Optional[_Iterable[_Union[Cidr, _Mapping]]] = ...) -> None: ...

class GeoIpList(_message.Message):
    __slots__ = ("entry",)
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    entry: _containers.RepeatedCompositeFieldContainer[GeoIp]
    def __init__(self, entry: _Optional[_Iterable[_Union[GeoIp, _Mapping]]] = ...) -> None: ...

class AddUserOperation(_message.Message):
    __slots__ = ("user",)
    USER_FIELD_NUMBER: _ClassVar[int]
    user: User
    def __init__(self, user: _Optional[_Union[User, _Mapping]] = ...) -> None: ...

class RemoveUserOperation(_message.Message):
    __slots__ = ("email",)
    EMAIL_FIELD_NUMBER: _ClassVar[int]
    email: str
    def __init__(self, email: _Optional[str] = ...) -> None: ...

class AlterInboundRequest(_message.Message):
    __slots__ = ("tag", "operation")
    TAG_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    tag: str
    operation: TypedMessage
    def __init__(self, tag: _Optional[str] = ..., operation: _Optional[_Union[TypedMessage, _Mapping]] = ...) -> None: ...

class AddInboundRequest(_message.Message):
    __slots__ = ("inbound",)
    INBOUND_FIELD_NUMBER: _ClassVar[int]
    inbound: InboundHandlerConfig
    def __init__(self, inbound: _Optional[_Union[InboundHandlerConfig, _Mapping]] = ...) -> None: ...

class RemoveInboundRequest(_message.Message):
    __slots__ = ("tag",)
    TAG_FIELD_NUMBER: _ClassVar[int]
    tag: str
    def __init__(self, tag: _Optional[str] = ...) -> None: ...

class GetInboundUserRequest(_message.Message):
    __slots__ = ("tag", "email")
    TAG_FIELD_NUMBER: _ClassVar[int]
    EMAIL_FIELD_NUMBER: _ClassVar[int]
    tag: str
    email: str
    def __init__(self, tag: _Optional[str] = ..., email: _Optional[str] = ...) -> None: ...

class GetInboundUserResponse(_message.Message):
    __slots__ = ("users",)
    USERS_FIELD_NUMBER: _ClassVar[int]
    users: _containers.RepeatedCompositeFieldContainer[User]
    def __init__(self, users: _Optional[_Iterable[_Union[User, _Mapping]]] = ...) -> None: ...

class GetInboundUsersCountResponse(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class Nothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("name", "reset")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    name: str
    reset: bool
    def __init__(self, name: _Optional[str] = ..., reset: bool = ...) -> None: ...

class Stat(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("stat",)
    STAT_FIELD_NUMBER: _ClassVar[int]
    stat: Stat
    def __init__(self, stat: _Optional[_Union[Stat, _Mapping]] = ...) -> None: ...

class QueryStatsRequest(_message.Message):
    __slots__ = ("pattern", "reset")
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    pattern: str
    reset: bool
    def __init__(self, pattern: _Optional[str] = ..., reset: bool = ...) -> None: ...

class QueryStatsResponse(_message.Message):
    __slots__ = ("stat",)
    STAT_FIELD_NUMBER: _ClassVar[int]
    stat: _containers.RepeatedCompositeFieldContainer[Stat]
    def __init__(self, stat: _Optional[_Iterable[_Union[Stat, _Mapping]]] = ...) -> None: ...

class SysStatsResponse(_message.Message):
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

class GetAllOnlineUsersResponse(_message.Message):
    __slots__ = ("users",)
    USERS_FIELD_NUMBER: _ClassVar[int]
    users: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, users: _Optional[_Iterable[str]] = ...) -> None: ...

class GetStatsOnlineIpListResponse(_message.Message):
    __slots__ = ("name", "ips")
    class IpsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    IPS_FIELD_NUMBER: _ClassVar[int]
    name: str
    ips: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., ips: _Optional[_Mapping[str, int]] = ...) -> None: ...

class OutboundStatus(_message.Message):
    __slots__ = ("alive", "delay", "outbound_tag", "last_seen_time", "last_try_time")
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    DELAY_FIELD_NUMBER: _ClassVar[int]
    OUTBOUND_TAG_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_TIME_FIELD_NUMBER: _ClassVar[int]
    LAST_TRY_TIME_FIELD_NUMBER: _ClassVar[int]
    alive: bool
    delay: int
    outbound_tag: str
    last_seen_time: int
    last_try_time: int
    def __init__(self, alive: bool = ..., delay: _Optional[int] = ..., outbound_tag: _Optional[str] = ..., last_seen_time: _Optional[int] = ..., last_try_time: _Optional[int] = ...) -> None: ...

class ObservationResult(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: _containers.RepeatedCompositeFieldContainer[OutboundStatus]
    def __init__(self, status: _Optional[_Iterable[_Union[OutboundStatus, _Mapping]]] = ...) -> None: ...

class GetOutboundStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: ObservationResult
    def __init__(self, status: _Optional[_Union[ObservationResult, _Mapping]] = ...) -> None: ...

class ListedRule(_message.Message):
    __slots__ = ("tag", "rule_tag")
    TAG_FIELD_NUMBER: _ClassVar[int]
    RULE_TAG_FIELD_NUMBER: _ClassVar[int]
    tag: str
    rule_tag: str
    def __init__(self, tag: _Optional[str] = ..., rule_tag: _Optional[str] = ...) -> None: ...

class ListRuleResponse(_message.Message):
    __slots__ = ("rules",)
    RULES_FIELD_NUMBER: _ClassVar[int]
    rules: _containers.RepeatedCompositeFieldContainer[ListedRule]
    def __init__(self, rules: _Optional[_Iterable[_Union[ListedRule, _Mapping]]] = ...) -> None: ...

class AddRuleRequest(_message.Message):
    __slots__ = ("config", "should_append")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    SHOULD_APPEND_FIELD_NUMBER: _ClassVar[int]
    config: TypedMessage
    should_append: bool
    def __init__(self, config: _Optional[_Union[TypedMessage, _Mapping]] = ..., should_append: bool = ...) -> None: ...

class RemoveRuleRequest(_message.Message):
    __slots__ = ("rule_tag",)
    RULE_TAG_FIELD_NUMBER: _ClassVar[int]
    rule_tag: str
    def __init__(self, rule_tag: _Optional[str] = ...) -> None: ...

class RoutingContext(_message.Message):
    __slots__ = ("inbound_tag", "network", "target_ips", "target_port", "target_domain", "protocol", "user", "attributes", "outbound_group_tags", "outbound_tag")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    INBOUND_TAG_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    TARGET_IPS_FIELD_NUMBER: _ClassVar[int]
    TARGET_PORT_FIELD_NUMBER: _ClassVar[int]
    TARGET_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    OUTBOUND_GROUP_TAGS_FIELD_NUMBER: _ClassVar[int]
    OUTBOUND_TAG_FIELD_NUMBER: _ClassVar[int]
    inbound_tag: str
    network: int
    target_ips: _containers.RepeatedScalarFieldContainer[bytes]
    target_port: int
    target_domain: str
    protocol: str
    user: str
    attributes: _containers.ScalarMap[str, str]
    outbound_group_tags: _containers.RepeatedScalarFieldContainer[str]
    outbound_tag: str
    def __init__(self, inbound_tag: _Optional[str] = ..., network: _Optional[int] = ..., target_ips: _Optional[_Iterable[bytes]] = ..., target_port: _Optional[int] = ..., target_domain: _Optional[str] = ..., protocol: _Optional[str] = ..., user: _Optional[str] = ..., attributes: _Optional[_Mapping[str, str]] = ..., outbound_group_tags: _Optional[_Iterable[str]] = ..., outbound_tag: _Optional[str] = ...) -> None: ...

class TestRouteRequest(_message.Message):
    __slots__ = ("routing_context", "field_selectors", "publish_result")
    ROUTING_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    FIELD_SELECTORS_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_RESULT_FIELD_NUMBER: _ClassVar[int]
    routing_context: RoutingContext
    field_selectors: _containers.RepeatedScalarFieldContainer[str]
    publish_result: bool
    def __init__(self, routing_context: _Optional[_Union[RoutingContext, _Mapping]] = ..., field_selectors: _Optional[_Iterable[str]] = ..., publish_result: bool = ...) -> None: ...

class OverrideInfo(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: str
    def __init__(self, target: _Optional[str] = ...) -> None: ...

class PrincipleTargetInfo(_message.Message):
    __slots__ = ("tag",)
    TAG_FIELD_NUMBER: _ClassVar[int]
    tag: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tag: _Optional[_Iterable[str]] = ...) -> None: ...

class BalancerMsg(_message.Message):
    __slots__ = ("override", "principle_target")
    OVERRIDE_FIELD_NUMBER: _ClassVar[int]
    PRINCIPLE_TARGET_FIELD_NUMBER: _ClassVar[int]
    override: OverrideInfo
    principle_target: PrincipleTargetInfo
    def __init__(self, override: _Optional[_Union[OverrideInfo, _Mapping]] = ..., principle_target: _Optional[_Union[PrincipleTargetInfo, _Mapping]] = ...) -> None: ...

class GetBalancerInfoRequest(_message.Message):
    __slots__ = ("tag",)
    TAG_FIELD_NUMBER: _ClassVar[int]
    tag: str
    def __init__(self, tag: _Optional[str] = ...) -> None: ...

class GetBalancerInfoResponse(_message.Message):
    __slots__ = ("balancer",)
    BALANCER_FIELD_NUMBER: _ClassVar[int]
    balancer: BalancerMsg
    def __init__(self, balancer: _Optional[_Union[BalancerMsg, _Mapping]] = ...) -> None: ...

class OverrideBalancerTargetRequest(_message.Message):
    __slots__ = ("balancer_tag", "target")
    BALANCER_TAG_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    balancer_tag: str
    target: str
    def __init__(self, balancer_tag: _Optional[str] = ..., target: _Optional[str] = ...) -> None: ...
