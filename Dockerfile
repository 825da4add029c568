FROM python:3.12-slim
COPY . /src
RUN pip install --no-cache-dir "/src[page]" && rm -rf /src
ENV LOADPEAK_HOME=/var/lib/loadpeak PYTHONUNBUFFERED=1
USER 65532:65532
EXPOSE 9839
ENTRYPOINT ["loadpeak"]
CMD ["serve"]
