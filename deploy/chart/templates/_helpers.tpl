{{- define "headgate.image" -}}
{{ .root.Values.image.repository }}/{{ .program }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "headgate.replicaUrls" -}}
{{- if not .Values.controlPlane.addresses }}
{{- fail "set controlPlane.addresses to the addresses of the nodes that run the control plane" }}
{{- end }}
{{- $urls := list }}
{{- range .Values.controlPlane.addresses }}
{{- $host := ternary (printf "[%s]" .) . (contains ":" .) }}
{{- $urls = append $urls (printf "https://%s:7443" $host) }}
{{- end }}
{{- join "," $urls }}
{{- end }}

{{- define "headgate.peers" -}}
{{- if eq (len .Values.controlPlane.addresses) 1 -}}
none
{{- else -}}
{{- include "headgate.replicaUrls" . | replace "https://" "" }}
{{- end }}
{{- end }}

{{- define "headgate.clusterCidr" -}}
{{- if not .Values.clusterCIDRs }}
{{- fail "set clusterCIDRs to the ranges of pod addresses, such as 10.244.0.0/16" }}
{{- end }}
{{- join "," .Values.clusterCIDRs }}
{{- end }}
