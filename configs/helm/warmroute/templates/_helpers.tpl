{{- define "warmroute.fullname" -}}
{{- if contains "warmroute" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-warmroute" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "warmroute.selector" -}}
app.kubernetes.io/name: warmroute
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "warmroute.labels" -}}
{{ include "warmroute.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- /* The name of one of Warmroute's images: (list $ "router"). */ -}}
{{- define "warmroute.image" -}}
{{- $image := (index . 0).Values.image -}}
{{- with $image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{ index $image (index . 1) }}:{{ $image.tag | default (index . 0).Chart.AppVersion }}
{{- end -}}

{{- define "warmroute.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "warmroute.fleetSecret" -}}
{{ .Values.fleetSecret.existingSecret | default (printf "%s-fleet" (include "warmroute.fullname" .)) }}
{{- end -}}

{{- define "warmroute.keysSecret" -}}
{{- if .Values.access.existingSecret -}}
{{ .Values.access.existingSecret }}
{{- else if .Values.access.keys -}}
{{ include "warmroute.fullname" . }}-keys
{{- end -}}
{{- end -}}

{{- /* The models, each with the defaults that it does not set. */ -}}
{{- define "warmroute.models" -}}
{{- range .Values.models }}
- {{- mustMergeOverwrite (deepCopy $.Values.modelDefaults) (deepCopy .) | toYaml | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "warmroute.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "warmroute.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* The chart's part of router.yaml, with the user's settings over it. */ -}}
{{- define "warmroute.config" -}}
{{- $name := include "warmroute.fullname" . -}}
{{- $config := dict "shares_replicas" (or .Values.router.autoscaling.enabled (gt (int .Values.router.replicas) 1)) -}}
{{- $each := dict -}}
{{- if .Values.engine.enabled -}}
{{- $_ := set $each "agent_port" 8090 -}}
{{- else -}}
{{- $_ := set $each "kv_events_port" 5557 -}}
{{- $_ := set $each "kv_replay_port" 5558 -}}
{{- $_ := set $each "hash_seed" "0" -}}
{{- end -}}
{{- if .Values.replicaApiKey.existingSecret -}}
{{- $_ := set $each "api_key_file" "/etc/warmroute-replica/api-key" -}}
{{- end -}}
{{- if eq .Values.front "envoy" -}}
{{- /* Envoy's configuration is made of the file, so the file names each replica. */ -}}
{{- $replicas := list -}}
{{- range $model := fromYamlArray (include "warmroute.models" .) -}}
{{- range $number := until (int $model.replicas) -}}
{{- $pod := printf "%s-%s-%d" $name $model.name $number -}}
{{- $host := printf "%s.%s-%s" $pod $name $model.name -}}
{{- $replica := dict "url" (printf "http://%s:8000" $host) "instance_id" $pod -}}
{{- if $.Values.engine.enabled -}}
{{- $_ := set $replica "agent_url" (printf "http://%s:8090" $host) -}}
{{- else -}}
{{- $_ := set $replica "kv_events" (printf "tcp://%s:5557" $host) -}}
{{- $_ := set $replica "kv_replay" (printf "tcp://%s:5558" $host) -}}
{{- $_ := set $replica "hash_seed" "0" -}}
{{- end -}}
{{- with $each.api_key_file -}}{{- $_ := set $replica "api_key_file" . -}}{{- end -}}
{{- $replicas = append $replicas $replica -}}
{{- end -}}
{{- end -}}
{{- $_ := set $config "replicas" $replicas -}}
{{- else -}}
{{- $selector := printf "app.kubernetes.io/instance=%s,app.kubernetes.io/component=replica" .Release.Name -}}
{{- $_ := set $config "discovery" (dict "kubernetes" (dict "selector" $selector) "each" $each) -}}
{{- end -}}
{{- $access := dict "admin_sha256" .Values.access.adminSha256 -}}
{{- if include "warmroute.keysSecret" . -}}
{{- $_ := set $access "keys_file" "/etc/warmroute-keys/keys.yaml" -}}
{{- end -}}
{{- if and .Values.monitoring.serviceMonitors (not .Values.monitoring.adminKeySecret.name) -}}
{{- $_ := set $access "metrics" "open" -}}
{{- end -}}
{{- $_ := set $config "access" $access -}}
{{- if .Values.tokenizers.existingClaim -}}
{{- $models := dict -}}
{{- range $model, $directory := .Values.tokenizers.models -}}
{{- $_ := set $models $model (dict "path" (printf "/var/lib/tokenizers/%s" $directory)) -}}
{{- end -}}
{{- $_ := set $config "tokenizer" (dict "models" $models) -}}
{{- end -}}
{{- if eq .Values.front "router" -}}
{{- $_ := set $config "host" "0.0.0.0" -}}
{{- $_ := set $config "port" 8080 -}}
{{- if .Values.tls.secretName -}}
{{- $_ := set $config "tls" (dict "cert_file" "/etc/warmroute-tls/tls.crt" "key_file" "/etc/warmroute-tls/tls.key") -}}
{{- end -}}
{{- else -}}
{{- /* Envoy asks from the same pod; Prometheus does not. */ -}}
{{- $host := ternary "127.0.0.1" "0.0.0.0" (and (eq .Values.front "envoy") (not .Values.monitoring.serviceMonitors)) -}}
{{- $_ := set $config "picker" (dict "host" $host "port" 9002 "http_port" 9003) -}}
{{- if eq .Values.front "envoy" -}}
{{- /* Where the generated Envoy listens. */ -}}
{{- $_ := set $config "host" "0.0.0.0" -}}
{{- $_ := set $config "port" 8080 -}}
{{- end -}}
{{- end -}}
{{- mustMergeOverwrite $config (deepCopy .Values.router.config) | toYaml -}}
{{- end -}}

{{- /* Mounts and volumes of a router or picker. */ -}}
{{- define "warmroute.routerMounts" -}}
- {name: config, mountPath: /etc/warmroute, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if include "warmroute.keysSecret" . }}
- {name: keys, mountPath: /etc/warmroute-keys, readOnly: true}
{{- end }}
{{- if .Values.tls.secretName }}
- {name: tls, mountPath: /etc/warmroute-tls, readOnly: true}
{{- end }}
{{- if .Values.replicaApiKey.existingSecret }}
- {name: replica-api-key, mountPath: /etc/warmroute-replica, readOnly: true}
{{- end }}
{{- if .Values.tokenizers.existingClaim }}
- {name: tokenizers, mountPath: /var/lib/tokenizers, readOnly: true}
{{- end }}
{{- end -}}

{{- define "warmroute.routerVolumes" -}}
- name: config
  configMap: {name: {{ include "warmroute.fullname" . }}}
- name: tmp
  emptyDir: {}
{{- with include "warmroute.keysSecret" . }}
- name: keys
  secret: {secretName: {{ . }}}
{{- end }}
{{- with .Values.tls.secretName }}
- name: tls
  secret: {secretName: {{ . }}}
{{- end }}
{{- with .Values.replicaApiKey.existingSecret }}
- name: replica-api-key
  secret: {secretName: {{ . }}}
{{- end }}
{{- with .Values.tokenizers.existingClaim }}
- name: tokenizers
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "warmroute.routerEnv" -}}
{{- if .Values.engine.enabled }}
- name: WARMROUTE_FLEET_SECRET
  valueFrom: {secretKeyRef: {name: {{ include "warmroute.fleetSecret" . }}, key: secret}}
{{- end }}
{{- with .Values.router.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* The engine's file. */ -}}
{{- define "warmroute.engine" -}}
{{- $engine := dict "chunk_size" 256 "max_local_cpu_size" .Values.engine.cpuGb "keep_cpu_dir" "/dev/shm/kept" "lmcache_worker_port" 8090 "agent_host" "0.0.0.0" -}}
{{- if .Values.engine.diskGb -}}
{{- $_ := set $engine "local_disk" "/var/cache/warmroute" -}}
{{- $_ := set $engine "max_local_disk_size" .Values.engine.diskGb -}}
{{- end -}}
{{- mustMergeOverwrite $engine (deepCopy .Values.engine.config) | toYaml -}}
{{- end -}}
