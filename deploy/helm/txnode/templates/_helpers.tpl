{{- define "txnode.name" -}}
{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "txnode.selector" -}}
app.kubernetes.io/name: txnode
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "txnode.labels" -}}
{{ include "txnode.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "txnode.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag }}{{ end }}
{{- end }}

{{- define "txnode.secretVolume" -}}
- name: {{ .volume }}
  secret:
    secretName: {{ .name }}
    defaultMode: 0440
{{- end }}

{{- define "txnode.probe" -}}
httpGet:
  scheme: HTTPS
  host: {{ .root.Values.probes.host | quote }}
  port: rest
  path: {{ .path }}
{{ toYaml .times }}
{{- end }}

{{- /* Volumes of secrets, each with the name of its secret. */ -}}
{{- define "txnode.secrets" -}}
{{- with .Values.secrets.apiKey.name }}
api-key: {{ . }}
{{- end }}
{{- with .Values.secrets.apiKeys.name }}
api-keys: {{ . }}
{{- end }}
{{- with .Values.secrets.certificate.name }}
certificate: {{ . }}
{{- end }}
{{- end }}

{{- define "txnode.environment" -}}
- name: REST_PORT
  value: {{ .Values.ports.rest | quote }}
- name: GRPC_PORT
  value: {{ .Values.ports.grpc | quote }}
{{- with .Values.secrets.apiKey }}
{{- if .name }}
- name: API_KEY_FILE
  value: /run/txnode/api-key/{{ .key }}
{{- end }}
{{- end }}
{{- with .Values.secrets.apiKeys }}
{{- if .name }}
- name: API_KEYS_FILE
  value: /run/txnode/api-keys/{{ .key }}
{{- end }}
{{- end }}
{{- if .Values.secrets.certificate.name }}
- name: SSL_CERT_FILE
  value: /run/txnode/certificate/tls.crt
- name: SSL_KEY_FILE
  value: /run/txnode/certificate/tls.key
{{- else }}
- name: HOST_ADDRESS
  valueFrom:
    fieldRef:
      fieldPath: status.hostIP
- name: SSL_SANS
  value: $(HOST_ADDRESS)
{{- end }}
{{- range $name, $value := .Values.settings }}
- name: {{ $name }}
  {{- if kindIs "bool" $value }}
  value: {{ ternary "on" "off" $value | quote }}
  {{- else if kindIs "string" $value }}
  value: {{ $value | quote }}
  {{- else }}
  value: {{ int64 $value | quote }}
  {{- end }}
{{- end }}
{{- end }}
