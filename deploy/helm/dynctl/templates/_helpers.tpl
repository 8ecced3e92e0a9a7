{{/* Pods of this release and of no other. The first label is what keeps routers from being taken for engines. */}}
{{- define "dynctl.selector" -}}
app.kubernetes.io/name: dynctl
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "dynctl.labels" -}}
{{ include "dynctl.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
