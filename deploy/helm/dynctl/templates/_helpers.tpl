{{/* The name of the release's objects, short enough for the suffix of the admin Service. */}}
{{- define "dynctl.fullname" -}}
{{- $part := .Values.nameOverride | default .Chart.Name }}
{{- $name := printf "%s-%s" .Release.Name $part }}
{{- if contains $part .Release.Name }}
{{- $name = .Release.Name }}
{{- end }}
{{- .Values.fullnameOverride | default $name | trunc 57 | trimSuffix "-" }}
{{- end }}

{{/* Selects the pods of this release only. Routers know by the first label that they are
no engines, so no value changes it. */}}
{{- define "dynctl.selector" -}}
app.kubernetes.io/name: dynctl
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "dynctl.labels" -}}
{{ include "dynctl.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "dynctl.serviceAccount" -}}
{{- $made := "default" }}
{{- if .Values.serviceAccount.create }}
{{- $made = include "dynctl.fullname" . }}
{{- end }}
{{- .Values.serviceAccount.name | default $made }}
{{- end }}

{{- define "dynctl.adminSecret" -}}
{{- .Values.adminToken.secret | default (printf "%s-admin" (include "dynctl.fullname" .)) }}
{{- end }}

{{- define "dynctl.image" -}}
{{- $i := .Values.image }}
{{- if or (not $i.repository) (not (or $i.tag $i.digest)) }}
{{- fail "image.repository and image.tag are not set, and dynctl has no public image. Build it with 'scripts/image.sh bin/image v1', push it with 'skopeo copy --all oci:bin/image:v1 docker://registry.example/dynctl:v1', and install the chart with '--set image.repository=registry.example/dynctl --set image.tag=v1'." }}
{{- end }}
{{- if $i.digest }}
{{- printf "%s@%s" $i.repository $i.digest }}
{{- else }}
{{- printf "%s:%s" $i.repository $i.tag }}
{{- end }}
{{- end }}

{{/* The seconds that a stopping router needs: it serves new requests for timeouts.leave,
running ones for timeouts.drain, and has ten seconds for the last bytes and its exit. */}}
{{- define "dynctl.grace" -}}
{{- $leave := "0s" }}
{{- $drain := "30s" }}
{{- with .Values.settings.timeouts }}
{{- $leave = .leave | default $leave }}
{{- $drain = .drain | default $drain }}
{{- end }}
{{- $begin := toDate "2006" "2000" }}
{{- $end := $begin | mustDateModify $leave | mustDateModify $drain | mustDateModify "10s" }}
{{- $need := ($end.Sub $begin).Seconds | ceil }}
{{- with .Values.terminationGracePeriodSeconds }}
{{- if lt (float64 .) $need }}
{{- fail (printf "terminationGracePeriodSeconds is %v, but settings.timeouts.leave (%s), settings.timeouts.drain (%s) and ten seconds for the exit need %v: raise it, shorten these, or leave it out to follow them." . $leave $drain $need) }}
{{- end }}
{{- $need = . }}
{{- end }}
{{- $need }}
{{- end }}
