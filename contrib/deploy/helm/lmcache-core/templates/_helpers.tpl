{{- define "lmcache-core.labels" -}}
{{ include "lmcache-core.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "lmcache-core.selector" -}}
app.kubernetes.io/name: lmcache-core
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "lmcache-core.directory-selector" -}}
app.kubernetes.io/name: lmcache-directory
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "lmcache-core.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* The settings of the values, and those that are the chart's own. */ -}}
{{- define "lmcache-core.toml" -}}
{{- $own := dict "runtime_dir" "/run/lmcache-core" "state_dir" "/var/lib/lmcache-core" -}}
{{- $_ := set $own "l1" (dict "access" "group" "gids" (list (.Values.gid | int64))) -}}
{{- if .Values.http.enabled -}}
{{- $folder := "/etc/lmcache-core-http" -}}
{{- $_ := set $own "http" (dict "host" "0.0.0.0" "port" (.Values.http.port | int64) "token_file" (printf "%s/token" $folder) "read_token_file" (printf "%s/read-token" $folder)) -}}
{{- end -}}
{{- if .Values.peers.enabled -}}
{{- $folder := "/etc/lmcache-core-peers" -}}
{{- $cluster := dict "redis_url" (include "lmcache-core.directory" .) "tls_ca_file" (printf "%s/ca.pem" $folder) "tls_cert_file" (printf "%s/node.pem" $folder) "tls_key_file" (printf "%s/node.key" $folder) -}}
{{- $_ := set $own "peer" (merge (dict "port" (.Values.peers.port | int64)) $cluster) -}}
{{- $_ := set $own "l2" (dict "peers" (merge (dict "type" "peer") $cluster)) -}}
{{- end -}}
{{- toToml (mergeOverwrite (deepCopy .Values.settings) $own) -}}
{{- end }}

{{- define "lmcache-core.directory" -}}
{{ .Values.peers.redisUrl | default (printf "redis://%s-directory:6379/0" .Release.Name) }}
{{- end }}

{{- define "lmcache-core.probe" -}}
{{- if (index . 0).Values.http.enabled -}}
httpGet: {path: {{ index . 1 }}, port: http}
{{- else -}}
exec:
  command: ["lmcache-core", "status", "--json"]
{{- end -}}
{{- end }}
