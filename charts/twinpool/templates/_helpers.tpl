{{/* The release's name, with the chart's unless it holds it: what all objects are named after. */}}
{{- define "twinpool.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "twinpool.operator" -}}
{{ include "twinpool.fullname" . }}-operator
{{- end }}

{{- define "twinpool.serviceAccount" -}}
{{ default (include "twinpool.operator" .) .Values.serviceAccount.name }}
{{- end }}

{{/* What pods of the operator are selected by; it must never change. */}}
{{- define "twinpool.selector" -}}
app.kubernetes.io/name: twinpool-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* What the pod of `helm test` is found by, beside the release that its other labels name. */}}
{{- define "twinpool.testSelector" -}}
app.kubernetes.io/name: twinpool-test
{{- end }}

{{/* Labels of the user's: (list . "operator.podLabels" map). Those by which things are found are the chart's. */}}
{{- define "twinpool.userLabels" -}}
{{- $taken := merge (include "twinpool.selector" (index . 0) | fromYaml) (dict "helm.sh/chart" "" "app.kubernetes.io/managed-by" "" "app.kubernetes.io/part-of" "" "app.kubernetes.io/version" "") -}}
{{- $where := index . 1 -}}
{{- range $key, $_ := index . 2 -}}
{{- if or (hasKey $taken $key) (hasPrefix "serving.twinpool.dev/" $key) -}}
{{- fail (printf "values: %s: %s is set by Twinpool, which finds its objects by it - choose another key" $where $key) -}}
{{- end -}}
{{- end -}}
{{- with index . 2 }}{{ toYaml . }}{{ end -}}
{{- end }}

{{- define "twinpool.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: twinpool
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- with include "twinpool.userLabels" (list . "labels" .Values.labels) }}
{{ . }}
{{- end }}
{{- end }}

{{/* A reference to one of Twinpool's images: (list . "operator"). A digest wins over the tag. */}}
{{- define "twinpool.image" -}}
{{- $images := (index . 0).Values.images -}}
{{- $image := index $images (index . 1) -}}
{{- $path := $image.repository -}}
{{- if $images.registry }}{{ $path = printf "%s/%s" (trimSuffix "/" $images.registry) $path }}{{ end -}}
{{- if $image.digest }}{{ $path }}@{{ $image.digest }}{{ else }}{{ $path }}:{{ $images.tag }}{{ end -}}
{{- end }}

{{/* "yes" where PodMonitors are made. */}}
{{- define "twinpool.podMonitors" -}}
{{- $wanted := .Values.podMonitors.create -}}
{{- if and (eq $wanted "auto") (eq .Values.serviceMonitors.create "always") }}{{ $wanted = "never" }}{{ end -}}
{{- include "twinpool.monitored" (dict "root" . "create" $wanted "kind" "PodMonitor") -}}
{{- end }}

{{/* Nothing is scraped twice: ServiceMonitors are made only where PodMonitors are not. */}}
{{- define "twinpool.serviceMonitors" -}}
{{- $pods := include "twinpool.podMonitors" . -}}
{{- if and $pods (eq .Values.serviceMonitors.create "always") -}}
{{- if eq .Values.podMonitors.create "always" -}}
{{- fail "podMonitors.create and serviceMonitors.create are both always, which would scrape everything twice - set one of them to never" -}}
{{- end -}}
{{- end -}}
{{- if not $pods -}}
{{- include "twinpool.monitored" (dict "root" . "create" .Values.serviceMonitors.create "kind" "ServiceMonitor") -}}
{{- end -}}
{{- end }}

{{/* Whether to make what is useful beside the Prometheus operator; auto goes by the CRD that is there. */}}
{{- define "twinpool.monitored" -}}
{{- $known := .root.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" .kind) -}}
{{- if or (eq .create "always") (and (eq .create "auto") $known) }}yes{{ end -}}
{{- end }}

{{/* securityContext of the chart's containers: what Pod Security "restricted" asks for, and more. */}}
{{- define "twinpool.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "twinpool.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* What the operator's --topology says: a preset, or LEVEL=LABEL|LABEL,... */}}
{{- define "twinpool.topology" -}}
{{- $levels := list -}}
{{- range $level, $labels := .Values.topology.levels }}{{ $levels = append $levels (printf "%s=%s" $level (join "|" $labels)) }}{{ end -}}
{{- if and $levels (ne .Values.topology.preset "auto") -}}
{{- fail "values: topology.preset and topology.levels are both set - leave topology.preset at auto to use labels of your own" -}}
{{- end -}}
{{- join "," $levels | default .Values.topology.preset -}}
{{- end }}

{{/* What the operator's --pods says, as JSON; empty where nothing is set. */}}
{{- define "twinpool.pods" -}}
{{- $pods := dict -}}
{{- with merge (dict) .Values.pools.labels .Values.labels }}{{ $_ := set $pods "labels" . }}{{ end -}}
{{- $_ := include "twinpool.userLabels" (list . "pools.labels" .Values.pools.labels) -}}
{{- range $key := list "annotations" "imagePullSecrets" -}}
{{- with index $.Values.pools $key }}{{ $_ := set $pods $key . }}{{ end -}}
{{- end -}}
{{- range $part := list "router" "worker" -}}
{{- $own := dict -}}
{{- range $key, $value := index $.Values.pools $part }}{{ with $value }}{{ $_ := set $own $key . }}{{ end }}{{ end -}}
{{- with $own }}{{ $_ := set $pods $part . }}{{ end -}}
{{- end -}}
{{- with $pods }}{{ toJson . }}{{ end -}}
{{- end }}
