{{- define "headgate.image" -}}
{{ .root.Values.image.repository }}/{{ .program }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "headgate.replicas" -}}
{{- if not .root.Values.controlPlane.addresses }}
{{- fail "set controlPlane.addresses to the addresses of the nodes that run the control plane" }}
{{- end }}
{{- $replicas := list }}
{{- range .root.Values.controlPlane.addresses }}
{{- $host := ternary (printf "[%s]" .) . (contains ":" .) }}
{{- $replicas = append $replicas (printf "%s%s:%v" $.scheme $host $.port) }}
{{- end }}
{{- join "," $replicas }}
{{- end }}

{{- define "headgate.replicaUrls" -}}
{{- include "headgate.replicas" (dict "root" . "scheme" "https://" "port" 7443) }}
{{- end }}

{{- define "headgate.enrolment" -}}
{{- include "headgate.replicas" (dict "root" . "scheme" "" "port" 7445) }}
{{- end }}

{{- define "headgate.clusterCidr" -}}
{{- if not .Values.clusterCIDRs }}
{{- fail "set clusterCIDRs to the ranges of pod addresses, such as 10.244.0.0/16" }}
{{- end }}
{{- join "," .Values.clusterCIDRs }}
{{- end }}
