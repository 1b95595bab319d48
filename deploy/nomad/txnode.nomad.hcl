# txnode on every client with the meta value txnode: nomad job run txnode.nomad.hcl
#
# In the configuration of each client:
#   client { meta { txnode = "true" } }
#   client { host_volume "txnode" { path = "/var/lib/txnode" } }    install -d -m 700 -o 65532 -g 65532 /var/lib/txnode
#   plugin "docker" { config { allow_caps = [..., "sys_ptrace"] } } with var.drop_nobody
#
# Secrets: nomad var put nomad/jobs/txnode api_keys=@api_keys [certificate=@chain.pem certificate_key=@key.pem]
# To make the file api_keys: python -m node.keys --file api_keys new panel

variable "datacenters" {
  type    = list(string)
  default = ["*"]
}

variable "image" {
  description = "The image made by deploy/Containerfile; best with its digest."
  type        = string
  default     = "txnode:latest"
}

variable "rest_port" {
  type    = number
  default = 62051
}

variable "grpc_port" {
  type    = number
  default = 62050
}

variable "settings" {
  description = "Other settings of docs/settings.md by their names."
  type        = map(string)
  default = {
    KEEP_ALIVE_ACTION = "keep"
  }
}

variable "certificate" {
  description = "Whether the job's variable has a certificate and its key. If not, each node makes its own."
  type        = bool
  default     = false
}

variable "drop_nobody" {
  description = "Add SYS_PTRACE: Docker's filter then allows pidfd_getfd, which changes without disconnections need. The node is not root, and does not get the capability."
  type        = bool
  default     = false
}

variable "drain_seconds" {
  description = "How long a stopping node goes on serving after it has left the services, so that users can be moved elsewhere."
  type        = number
  default     = 0
}

variable "memory" {
  description = "MiB for the node, the core, and for a moment a second core."
  type        = number
  default     = 1024
}

locals {
  pair = var.certificate ? { "certificate.pem" = "certificate", "key.pem" = "certificate_key" } : {}
}

job "txnode" {
  datacenters = var.datacenters
  type        = "system"

  constraint {
    attribute = "${meta.txnode}"
    value     = "true"
  }

  # One client after another, each after the node before was ready for min_healthy_time.
  update {
    max_parallel     = 1
    health_check     = "checks"
    min_healthy_time = "10s"
    healthy_deadline = "3m"
  }

  group "node" {
    shutdown_delay = "${var.drain_seconds}s"

    network {
      mode = "host"
      port "rest" {
        static = var.rest_port
      }
      port "grpc" {
        static = var.grpc_port
      }
    }

    volume "state" {
      type   = "host"
      source = "txnode"
    }

    restart {
      attempts = 3
      interval = "5m"
      delay    = "5s"
      mode     = "delay"
    }

    service {
      name     = "txnode"
      provider = "nomad"
      port     = "rest"

      check {
        name            = "ready"
        type            = "http"
        protocol        = "https"
        tls_skip_verify = true
        path            = "/readyz"
        interval        = "10s"
        timeout         = "5s"
      }

      # A check of its own: a missing backend must not restart a live node.
      check {
        name            = "live"
        type            = "http"
        protocol        = "https"
        tls_skip_verify = true
        path            = "/livez"
        interval        = "10s"
        timeout         = "5s"

        check_restart {
          limit = 6
          grace = "60s"
        }
      }
    }

    task "node" {
      driver = "docker"
      user   = "65532"

      # Time to read the last counters and end the core. The client's max_kill_timeout, by default 30s, is the maximum.
      kill_signal  = "SIGTERM"
      kill_timeout = "30s"

      config {
        image           = var.image
        network_mode    = "host"
        readonly_rootfs = true
        cap_drop        = ["all"]
        cap_add         = var.drop_nobody ? ["sys_ptrace"] : []
        security_opt    = ["no-new-privileges:true"]

        ulimit {
          nofile = "1048576:1048576"
          core   = "0"
        }

        mount {
          type   = "tmpfs"
          target = "/tmp"
          tmpfs_options {
            size = 67108864
          }
        }
      }

      volume_mount {
        volume      = "state"
        destination = "/var/lib/txnode"
      }

      env = merge(var.settings, {
        REST_PORT     = "${NOMAD_PORT_rest}"
        GRPC_PORT     = "${NOMAD_PORT_grpc}"
        API_KEYS_FILE = "${NOMAD_SECRETS_DIR}/api_keys"
        SSL_SANS      = "${attr.unique.network.ip-address}"
        }, var.certificate ? {
        SSL_CERT_FILE = "${NOMAD_SECRETS_DIR}/certificate.pem"
        SSL_KEY_FILE  = "${NOMAD_SECRETS_DIR}/key.pem"
      } : {})

      # The node reads renewed keys and certificates without a restart.
      dynamic "template" {
        for_each = merge({ "api_keys" = "api_keys" }, local.pair)
        content {
          destination   = "secrets/${template.key}"
          data          = "{{ with nomadVar \"nomad/jobs/txnode\" }}{{ .${template.value} }}{{ end }}"
          uid           = 65532
          gid           = 65532
          perms         = "0400"
          change_mode   = "signal"
          change_signal = "SIGHUP"

          error_on_missing_key = true
        }
      }

      resources {
        cpu        = 200
        memory     = 256
        memory_max = var.memory
      }
    }
  }
}
