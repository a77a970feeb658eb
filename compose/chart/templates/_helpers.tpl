{{- /* At most 20 characters, so that a worker's pod has a host name of its own. */}}
{{- define "penstock.fullname" -}}
{{- $name := contains "penstock" .Release.Name | ternary .Release.Name (printf "%s-penstock" .Release.Name) -}}
{{- $name | trunc 20 | trimSuffix "-" -}}
{{- end }}

{{- /* Takes (dict "root" $ "part" "gateway"), and "model" of a worker. */}}
{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- with .model }}
penstock/model: {{ . }}
{{- end }}
{{- end }}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "penstock.secret" -}}
{{- if not (or .Values.secrets.existing .Values.redis.bundled) -}}
{{- fail "secrets.existing: name a Secret of the files that `penstock acl --into FOLDER` writes; or set redis.bundled for a trial" -}}
{{- end -}}
{{- .Values.secrets.existing | default (printf "%s-secrets" (include "penstock.fullname" .)) -}}
{{- end }}

{{- /* The fields that all pods have. Takes "root" and "of", the part's values. */}}
{{- define "penstock.pod" -}}
serviceAccountName: {{ .root.Values.serviceAccount.name | default (include "penstock.fullname" .root) }}
automountServiceAccountToken: false
enableServiceLinks: false # a Service's variables would be taken for settings
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .of.pod }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "penstock.locked" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- /* The fields that all of Penstock's containers have. Takes "root", "of", "image" and "settings". */}}
{{- define "penstock.container" -}}
image: "{{ .image }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}"
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{ include "penstock.locked" . }}
resources:
  {{- toYaml .of.resources | nindent 2 }}
env:
  {{- range $name, $value := mergeOverwrite (deepCopy .root.Values.settings) .settings }}
  - name: PENSTOCK_{{ upper $name }}
    {{- if kindIs "slice" $value }}
    value: {{ join "," $value | quote }}
    {{- else if kindIs "map" $value }}
    value: {{ toJson $value | quote }}
    {{- else if kindIs "float64" $value }}
    value: {{ toJson $value | quote }}
    {{- else }}
    value: {{ $value | quote }}
    {{- end }}
  {{- end }}
  {{- if .hasServerSecret }}
  - name: PENSTOCK_SERVER_SECRET
    valueFrom:
      secretKeyRef: {name: {{ include "penstock.secret" .root }}, key: server-secret}
  {{- end }}
  {{- with .of.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- /* The volumes that all pods have: a role's own file of the Secret, and room for what is for now. */}}
{{- define "penstock.volumes" -}}
- name: secrets
  secret:
    secretName: {{ include "penstock.secret" .root }}
    defaultMode: 0440
    items:
      - {key: {{ .role }}.yaml, path: {{ .role }}.yaml}
- name: tmp
  emptyDir: {}
{{- end }}

{{- define "penstock.mounts" -}}
- {name: secrets, mountPath: /secrets, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "penstock.files.volume" -}}
- name: files
  persistentVolumeClaim:
    claimName: {{ .Values.storage.files.existing | default (printf "%s-files" (include "penstock.fullname" .)) }}
{{- end }}

{{- /* The settings of a part that knows files. Takes "root" and "of". */}}
{{- define "penstock.filed" -}}
{{- $files := .root.Values.storage.files.enabled | ternary (dict "files_folder" "/files") dict -}}
{{- toYaml (merge (deepCopy .of.settings) $files) -}}
{{- end }}

{{- /* A worker is well if others see its lease run and its engine move. */}}
{{- define "penstock.isSeen" -}}
grep -Eq "\"worker\": \"$HOSTNAME-[^}]*\"state\": \"(serving|draining)\""
{{- end }}

{{- /* A model with the values of `worker` where it has none of its own. */}}
{{- define "penstock.model" -}}
{{- mergeOverwrite (deepCopy .root.Values.worker) (deepCopy .model) | toYaml -}}
{{- end }}
